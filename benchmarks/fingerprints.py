"""Whether trainings of before still stand: what an algorithm does, told by a training of a second.

A fingerprint is the loss that a small network comes to, and the share of the bytes. Where it has changed
since an arm was trained, so has the algorithm, and what was trained then says nothing of today's. Where one
of the recorded trainings, made again, ends as its record says, the code of today does what that of then did,
and today's fingerprint is noted for all of the arm's records (`python benchmarks/accuracy.py --again`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from paired import RESULTS, hardware
from tacit.errors import AttachError, ConfigError
from tacit.files import put
from tacit_lab.recipes.digits import Digits
from tacit_lab.recipes.recipe import seeded
from tacit_lab.study.jobs import Ended, StudyRun
from tacit_lab.study.training import train

FILE = RESULTS / "fingerprints.json"
STEPS = 104
"""The longest period of an arm is 100."""


class Small(Digits):
    """Handwritten digits by two matrices of 9,472 entries, so that a training takes a second."""

    batch = 8

    def __init__(self, adam: bool) -> None:
        self._adam = adam

    def model(self, seed: int) -> nn.Module:
        """One hidden layer."""
        return seeded(_network, seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD with momentum, or Adam for what is for it alone."""
        return torch.optim.Adam(model.parameters()) if self._adam else super().optimizer(model)


def _network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@cache
def fingerprint(arm: str) -> tuple[float, float]:
    """The loss of training and the share of plain training's bytes; some seconds at most."""
    job = StudyRun("digits", arm, STEPS, seed=0, rate=1.0)
    try:
        found = train(job, Small(adam=False), {})
    except (AttachError, ConfigError):
        found = train(job, Small(adam=True), {})
    return found.loss, found.share


def same(a: Iterable[float], b: Iterable[float]) -> bool:
    """Whether two are of one algorithm; processors round differently, so losses differ a little."""
    (loss, share), (other, its) = a, b
    return math.isclose(loss, other, rel_tol=0.02) and math.isclose(share, its, rel_tol=1e-3)


def noted() -> dict[str, Any]:
    """What is kept for each arm: its `fingerprint`, and the `date`, `commit` and `job` that showed it."""
    return dict(json.loads(FILE.read_text())) if FILE.is_file() else {}


def standing(arm: str, kept: Mapping[str, Any]) -> bool | None:
    """Whether the records of an arm are of today's algorithm; None where nobody has looked."""
    return same(kept[arm]["fingerprint"], fingerprint(arm)) if arm in kept else None


def note(arm: str, job: StudyRun) -> None:
    """The records of the arm are of today's algorithm, as one of them has shown."""
    about = hardware()
    told = {"job": vars(job), "date": about["date"], "commit": about["commit"]}
    kept = {**noted(), arm: {"fingerprint": list(fingerprint(arm)), **told}}
    put(FILE, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def as_recorded(now: Ended, then: Ended, half: float | None) -> bool:
    """Whether a training that was made again has ended as its record says.

    Processors round differently, after which two trainings go apart as two of different seeds do.

    Args:
        half: the half interval of the arm's gap over its seeds; None of a single one.
    """
    spread = 0.02 if half is None else max(0.005, 2 * half)
    return math.isclose(now.share, then.share, rel_tol=0.01) and abs(now.accuracy - then.accuracy) <= spread
