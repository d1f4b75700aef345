"""What the benchmarks share: arms timed in interleaved blocks of a run, the testbed, the hardware's name."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.testbed import Result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


_MARK = "RESULT "


def tell(found: object) -> None:
    """Print, on one rank, what `in_testbed` is to give."""
    print(_MARK + json.dumps(found), flush=True)


def in_testbed(cluster: str, argv: Sequence[str], **options: Any) -> Any:
    """Run a script on every rank of an emulated cluster, and give what one of them `tell`s.

    `options`: for `Testbed.run`.

    Raises:
        SystemExit: a rank failed, or none told anything.
    """

    def listen(node: int, line: str) -> None:
        if line.strip():
            print(f"node {node}: {line}", file=sys.stderr)

    result, found = heard(cluster, argv, listen, **options)
    if result.returncode or not found:
        raise SystemExit(f"{' '.join(argv)} on {cluster} failed: {result.failures}")
    return found[0]


def heard(
    cluster: str, argv: Sequence[str], on_line: Callable[[int, str], None], **options: Any
) -> tuple[Result, list[Any]]:
    """Run a script on every rank of an emulated cluster: how it ended, and what its ranks told.

    `on_line` gets the node and the line of all else that they print; `options` are for `Testbed.run`.
    """
    from tacit.cluster import Cluster
    from tacit.testbed import Testbed

    found: list[Any] = []

    def listen(node: int, line: str) -> None:
        if line.startswith(_MARK):
            found.append(json.loads(line.removeprefix(_MARK)))
        else:
            on_line(node, line)

    with Testbed(Cluster.parse(cluster)) as bed:
        return bed.run(list(argv), on_line=listen, **options), found


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


def conclude(result: Mapping[str, Any], text: str, options: argparse.Namespace, name: str = "") -> None:
    """Print the text; --save: keep the result, by its benchmark's name or `name`; --json: print it too."""
    print(text, file=sys.stderr if options.json else sys.stdout)
    if options.save:
        print(f"saved {save(name or str(result['benchmark']), result)}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
