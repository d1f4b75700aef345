"""What the benchmarks share: arms timed in interleaved blocks of one run, and the hardware's name."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Arm:
    """One arm's block times.

    Attributes:
        step: one step of this arm.
        steps: a block's length.
        warmup: steps that are not timed, first.
    """

    step: Callable[[], object]
    steps: int = 1
    warmup: int = 4


def interleave(
    arms: Mapping[str, Arm],
    blocks: int,
    fence: Callable[[], None],
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Seconds a step, for each arm and block: A B C C B A ..., so that drift hits all arms alike."""
    for arm in arms.values():
        for _ in range(arm.warmup):
            arm.step()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks):
        order = list(arms) if block % 2 == 0 else list(arms)[::-1]
        for name in order:
            fence()
            start = clock()
            for _ in range(arms[name].steps):
                arms[name].step()
            seconds[name].append((clock() - start) / arms[name].steps)
    return seconds


def paired_ratio(above: list[float], below: list[float]) -> dict[str, float]:
    """The median of the block-by-block ratios, with its quartiles."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": middle, "q1": low, "q3": high}


def hardware() -> dict[str, object]:
    """The machine and the versions that a figure belongs to."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "date": date.today().isoformat(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit,
    }


def save(name: str, result: object) -> Path:
    """Write a dated result under benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.json"
    path.write_text(json.dumps(result, indent=1, default=asdict) + "\n")
    return path
