"""One training of a study: all workers in this process, which is many times faster than on a network."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict

import torch

from tacit.algorithms import parse
from tacit_lab.recipes.recipe import Recipe
from tacit_lab.records import Environment
from tacit_lab.study.jobs import Ended, StudyRun, written
from tacit_lab.study.replicas import Replicas

WORKERS = 4
BY_NODE = ("ednncomm", "daso")
"""Trained on two nodes of two ranks; all others on four nodes."""


def train(
    job: StudyRun, recipe: Recipe, about: Mapping[str, object] | None = None, device: str = "cpu"
) -> Ended:
    """Train it, in this process.

    Args:
        about: the machine, for the record; by default as `tacit compare` has it.
        device: where the networks are.
    """
    about = asdict(Environment.here()) if about is None else about
    start = time.process_time()
    if device == "cuda":
        about = {**about, "gpu": torch.cuda.get_device_name()}
    done = Replicas(
        recipe,
        parse(written(job.arm, job.steps)),
        steps=job.steps,
        seed=job.seed,
        rate=job.rate,
        workers=WORKERS,
        ranks_per_node=2 if job.arm.partition(":")[0] in BY_NODE else 1,
        device=device,
    ).train()
    accuracy = recipe.evaluate(done.model)[1] if done.finite else 0.0
    held = recipe.validate(done.model)
    validation = -done.loss if held is None else held
    if not done.finite:
        validation = -math.inf if held is None else 0.0
    spent, share = time.process_time() - start, done.sent / done.plain
    return Ended(job, accuracy, validation, done.loss, share, spent, about)
