"""A grid of training runs that can be interrupted, and what is said of its runs paired by seed.

    runs = [Run(("digits",), name, "2x2@100mbit", seed=seed) for seed in range(3) for name in ("ddp", "daso")]
    for row in paired(carry_out(runs, Path("runs.jsonl")), baseline="ddp"): ...

Each run that ends is a line of JSON in the file, with its configuration, versions, commit, hardware and date.
A run that is there is not made again, so what was interrupted goes on where it stopped; one that failed is
there with its message, and is tried again. What `tacit compare` trains anyway, ranks that never talk, is kept
under the algorithm `compute-only`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from comparing import by_compare
from paired import ROOT, hardware
from runs import COMPUTE_ONLY, Done, Run, append, held, read
from tacit_lab.intervals import Mean

__all__ = [
    "COMPUTE_ONLY",
    "RUNS",
    "Done",
    "Execute",
    "Run",
    "append",
    "by_compare",
    "carry_out",
    "held",
    "paired",
    "read",
]

RUNS = ROOT / "tacit-out"
"""Where grids are kept that are not results."""

Execute: TypeAlias = Callable[[Run, Sequence[str]], Iterator[Done]]
"""Makes the runs of some algorithms, otherwise alike; gives each as it ends, and stops behind a failure."""


def carry_out(
    runs: Iterable[Run],
    path: Path,
    execute: Execute | None = None,
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> list[Done]:
    """Make the runs that the file does not hold; all that are asked for and were made, and `compute-only`.

    Runs that differ in the algorithm only are made one right after the other, in the order they are given.
    """
    from tacit_lab.cli.interrupts import Interrupted, interruptible

    try:
        with interruptible():
            return _carried_out(list(dict.fromkeys(runs)), path, execute or by_compare, tell)
    except Interrupted as error:
        tell(f"{error}; {path} holds what was made until then, and the same command goes on from there")
        raise SystemExit(error.code) from None


def _carried_out(
    wanted: Sequence[Run], path: Path, execute: Execute, tell: Callable[[str], None]
) -> list[Done]:
    ok = held(path)
    missing = [run for run in wanted if run.key not in ok]
    commits = sorted({str(ok[run.key].hardware.get("commit")) for run in wanted if run.key in ok})
    made = f", made at commit {', '.join(commits)}" if commits else ""
    tell(f"{len(wanted)} runs, of which {path} holds {len(wanted) - len(missing)}{made}")
    groups: dict[Run, list[str]] = {}
    for run in missing:
        groups.setdefault(replace(run, algorithm=""), []).append(run.algorithm)
    for i, (group, algorithms) in enumerate(groups.items(), start=1):
        tell(f"{i} of {len(groups)}: {' '.join(group.recipe)} on {group.cluster}, seed {group.seed}")
        about = hardware()
        while algorithms:
            ended: set[str] = set()
            for done in execute(group, algorithms):
                ended.add(done.run.algorithm)
                if done.status != "interrupted":
                    append(path, replace(done, hardware=done.hardware or about).to_json())
                tell(f"  {done.run.algorithm}: {_outcome(done)}")
            if not ended & set(algorithms):
                break
            algorithms = [each for each in algorithms if each not in ended]
    asked = {run.key for run in wanted} | {replace(run.key, algorithm=COMPUTE_ONLY) for run in wanted}
    return [done for done in read(path) if done.run in asked]


def _outcome(done: Done) -> str:
    if done.status != "ok":
        return f"{done.status}, {done.error}"
    found = "not evaluated" if done.accuracy is None else f"{done.accuracy:.4f}"
    return f"{found} in {done.seconds or math.nan:.1f} s"


# ---- statistics ---------------------------------------------------------------------------------------


def paired(done: Iterable[Done], baseline: str = "ddp") -> list[dict[str, Any]]:
    """Each algorithm against the baseline in the same setting, over the seeds that both have.

    Returns:
        Rows with the setting, `accuracy` and `baseline_accuracy` (means), `difference` of accuracies, and
        `time` and `bytes`, the baseline's being 1: each a `Mean`, or None where it was not measured.
    """
    found = {each.run: each for each in done if each.status == "ok"}
    pairs: dict[tuple[Run, str], list[tuple[Done, Done]]] = {}
    for run, each in found.items():
        base = found.get(replace(run, algorithm=baseline))
        if base is not None and run.algorithm not in (baseline, COMPUTE_ONLY):
            pairs.setdefault((run.setting, run.algorithm), []).append((each, base))
    return [
        {
            **asdict(replace(setting, algorithm=algorithm)),
            "baseline": baseline,
            "seeds": sorted(each.run.seed for each, _ in both),
            "accuracy": Mean.of([each.accuracy for each, _ in both if each.accuracy is not None]),
            "baseline_accuracy": Mean.of([base.accuracy for _, base in both if base.accuracy is not None]),
            "difference": Mean.of(_each(both, "accuracy", lambda a, b: a - b)),
            "time": Mean.of(_each(both, "seconds", lambda a, b: a / b)),
            "bytes": Mean.of(
                _each([two for two in both if two[1].megabytes], "megabytes", lambda a, b: a / b)
            ),
        }
        for (setting, algorithm), both in pairs.items()
    ]


def _each(both: Sequence[tuple[Done, Done]], name: str, of: Callable[[float, float], float]) -> list[float]:
    values = [(getattr(each, name), getattr(base, name)) for each, base in both]
    return [of(a, b) for a, b in values if a is not None and b is not None]
