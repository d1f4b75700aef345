"""What the benchmarks share: arms timed in interleaved blocks of a run, results, the hardware's name."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from tacit.files import put

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "tacit-out"
"""Where runs are kept that are not results."""


def verdict(row: Mapping[str, Any]) -> str:
    """What was promised of a row, and what was found; nothing where nothing was promised."""
    if not row["against"]:
        return ""
    met = "" if row["met"] is None else " met" if row["met"] else " MISSED"
    return f"  {row['promised']:.2f} of {row['against']}: {row['found']:.3f}{met}"


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
    return {
        "date": date.today().isoformat(),
        "cpu": f"{models[0] if models else platform.processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


@dataclass(frozen=True)
class Ticks:
    """What all processors have done since the machine started, in the kernel's ticks.

    Attributes:
        busy: at work here; `idle`: without work.
        stolen: with work, while the hypervisor let others have the processor.
    """

    busy: int
    idle: int
    stolen: int

    @classmethod
    def now(cls) -> Ticks:
        """Until now."""
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        user, nice, system, idle, waiting, irq, softirq, stolen = map(int, first.split()[1:9])
        return cls(user + nice + system + irq + softirq, idle + waiting, stolen)

    def __sub__(self, before: Ticks) -> Ticks:
        return Ticks(self.busy - before.busy, self.idle - before.idle, self.stolen - before.stolen)

    @property
    def withheld(self) -> float:
        """The share of the time with work that the hypervisor withheld, 0..1."""
        return self.stolen / max(1, self.busy + self.stolen)


def commit() -> str:
    """The code's, with a `+` where src or benchmarks have changed since."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)


def save(name: str, result: object) -> Path:
    """Write a dated result under benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.json"
    put(path, json.dumps(result, indent=1, default=asdict) + "\n")
    return path


def named(name: str, options: argparse.Namespace) -> str:
    """A result's: one of a part (--only), or a quick one, does not take the place of a whole one."""
    part = re.sub("[,/]", "-", getattr(options, "only", None) or "")
    return "-".join(filter(None, [name, part, "quick" if options.quick else ""]))


def add_table(parser: argparse.ArgumentParser) -> None:
    """The option --table FILE, whose value is what the file holds."""
    parser.add_argument(
        "--table", type=_saved, metavar="FILE", help="print the table of a saved run, and no more"
    )


def _saved(name: str) -> Any:
    try:
        return json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{name} cannot be read ({error}); give what --save has written"
        ) from None


def conclude(result: Mapping[str, Any], text: str, options: argparse.Namespace) -> None:
    """Print the text; --save: keep the result; --json: print it too."""
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.save:
        print(f"saved {save(named(str(result['benchmark']), options), result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
