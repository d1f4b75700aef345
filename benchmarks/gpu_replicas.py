"""How a training goes on a GPU: a GPT of 30 million parameters on Python's source; a part of `gpu.py`.

Four replicas in one process (`tacit_lab.study.replicas`): what they exchange is what ranks would, without a
network. All arms take equally many steps, as many as fit into the time that is left, each with the learning
rate that the recipe has, in TF32. One seed: a difference between arms is no finding; an arm that does not
learn is one.
"""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import nn

from gpu_checks import Check, Row, Setting
from tacit.algorithms import parse
from tacit_lab.recipes.bytes import LENGTH, Gpt
from tacit_lab.recipes.models.gpt import GPT
from tacit_lab.recipes.recipe import seeded
from tacit_lab.study.replicas import Replicas

ARMS = ("dense", "lowbit:bits=2,entropy=true", "zeroone-adam", "diloco")
FIRST = f"training: {ARMS[0]}"
WORKERS, TRIED = 4, 12
LEAST = 100
"""Steps that are worth a curve."""
POINTS = 40
"""Of a curve."""
SPARED = 0.8
"""The share of the time that steps may take; the rest is for beginnings, and for what was timed wrongly."""


class Gpt30M(Gpt):
    """The recipe `gpt`, larger: six blocks of width 640, which have 29,783,040 parameters."""

    batch, steps = 16, 1_000_000

    def __init__(self, small: bool) -> None:
        super().__init__()
        self._small = small

    def model(self, seed: int) -> nn.Module:
        """On a CPU one block of width 32."""
        width, heads, blocks = (32, 2, 1) if self._small else (640, 10, 6)
        made = partial(GPT, vocabulary=256, length=LENGTH, width=width, heads=heads, blocks=blocks)
        return seeded(made, seed)


def replicas(arm: str, setting: Setting, steps: int) -> Replicas:
    """The workers of an arm."""
    recipe = Gpt30M(setting.small)
    return Replicas(recipe, parse(arm), steps=steps, workers=WORKERS, device=setting.device.type)


def pace(arm: str, setting: Setting) -> float:
    """Seconds a step."""
    begun: list[float] = []
    tried = tried_in(setting)
    replicas(arm, setting, tried).train(lambda step, loss: begun.append(time.perf_counter()))
    return (begun[-1] - begun[tried // 2]) / (len(begun) - 1 - tried // 2)


def tried_in(setting: Setting) -> int:
    """Steps by which a pace is told; all that a CPU takes."""
    return 4 if setting.small else TRIED


def trained(setting: Setting, arm: str) -> Row:
    """Train an arm; the first one chooses the steps of all by the pace of each."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")  # TF32, for all arms
    try:
        return in_tf32(setting, arm)
    finally:
        torch.set_float32_matmul_precision(before)


def in_tf32(setting: Setting, arm: str) -> Row:
    """What came of it; `trained` has set the precision."""
    found = setting.found.get(FIRST)
    if found is None:
        begun = time.perf_counter()
        paces = {each: pace(each, setting) for each in ARMS}
        left = setting.seconds - (time.perf_counter() - begun)
        steps = tried_in(setting) if setting.small else max(LEAST, int(SPARED * left / sum(paces.values())))
    else:
        paces, steps = found["paces"], found["steps"]
    every, losses, curve = max(1, steps // POINTS), [], []

    def after(step: int, loss: float) -> None:
        losses.append(loss)
        if step % every == 0:
            curve.append([step, sum(losses[-every:]) / every])

    begun = time.perf_counter()
    workers = replicas(arm, setting, steps)
    done = workers.train(after)
    seconds = time.perf_counter() - begun
    loss, right = Gpt30M(setting.small).evaluate(done.model)
    print(
        f"{arm:28} {done.steps} steps in {seconds:.0f} s, loss {done.loss:.3f}; held out {loss:.3f}, "
        f"{100 * right:.1f} % right; {100 * done.sent / done.plain:.2f} % of dense's bytes",
        flush=True,
    )
    return {
        "arm": arm, "workers": WORKERS, "paces": paces, "steps": steps, "taken": done.steps,
        "seconds": seconds, "loss": done.loss, "held_out_loss": loss, "held_out_right": right,
        "bytes_of_dense": done.sent / done.plain, "finite": done.finite, "curve": curve,
    }  # fmt: skip


CHECKS = [
    Check(
        f"training: {arm}",
        30 if arm == ARMS[0] else 15,
        f"a training curve of {arm}",
        partial(trained, arm=arm),
        fills=True,
    )
    for arm in ARMS
]
