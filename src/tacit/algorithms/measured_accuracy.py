"""What algorithms cost in accuracy, as `benchmarks/accuracy.py` measures it; docs/accuracy.md says how."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class MeasuredGap:
    """The accuracy of trainings with an algorithm, minus that of plain training with equal seeds.

    Attributes:
        algorithm: the name; `attached`: the whole text that was attached.
        task: what was trained, by its name on the page; `steps`: for how long.
        bytes: of plain training's, as a share.
        gap: the mean difference of accuracies in 0..1; `half`: half the width of its 95 % interval, None for
            one seed; `seeds`: how many.
    """

    algorithm: str
    attached: str
    task: str
    steps: int
    bytes: float
    gap: float
    half: float | None
    seeds: int


@cache
def gaps() -> tuple[MeasuredGap, ...]:
    """All that was measured, of each algorithm and task the longest training."""
    return tuple(MeasuredGap(**each) for each in json.loads(_FILE.read_text()))


def gaps_of(name: str) -> list[MeasuredGap]:
    """Those of one algorithm."""
    return [each for each in gaps() if each.algorithm == name]
