"""Runs as `tacit compare` makes them, but all in the same processes: to start some is half of a short run.

python benchmarks/together.py ABOUT    # what it starts: JSON with a run's words, and the algorithms
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from comparing import watched
from launched import in_testbed, tell
from runs import COMPUTE_ONLY, Done, Run


def together(group: Run, algorithms: Sequence[str]) -> Iterator[Done]:
    """Make runs one after the other, in one launch; the first without an end has failed if that has.

    On shaped links, where times count, ranks that never talk come last.
    """
    shaped = "@" in group.cluster
    with TemporaryDirectory(prefix="tacit-grid-") as folder:
        out = Path(folder) / "out"
        out.mkdir()
        about = {
            "recipe": group.recipe,
            "cluster": group.cluster,
            "seed": group.seed,
            "epochs": group.epochs,
            "algorithms": [*algorithms, *[COMPUTE_ONLY] * shaped],
            "out": str(out / "records.jsonl"),
        }
        given, said = yield from watched(group, [sys.executable, __file__, json.dumps(about)], out)
        missing = [each for each in algorithms if each not in given]
        if said is not None and missing:
            why = (said.splitlines() or ["it printed nothing"])[-1]
            yield Done(replace(group, algorithm=missing[0]), "failed", error=f"{why}\n{said}")


def rank_main(about: Mapping[str, Any]) -> None:
    """Train with each algorithm; rank 0 records."""
    from arms import ranks
    from tacit.algorithms import parse
    from tacit.files import Log
    from tacit.json_lines import Line
    from tacit_lab import recipes
    from tacit_lab.recipes.training import Task, train
    from windows import choices

    recipe = recipes.get(about["recipe"][0], choices(about["recipe"]))
    with ranks(60) as rank:
        log = Log(Path(about["out"])) if rank == 0 else None

        def record(line: Line) -> None:
            """Rank 0 records for all."""
            if log is not None:
                log.write(line.to_json())

        for algorithm in about["algorithms"]:
            task = Task(
                strategy=None if algorithm == COMPUTE_ONLY else parse(algorithm),
                epochs=about["epochs"] or recipe.epochs,
                seed=about["seed"],
                target=recipe.target,
                cluster=about["cluster"],
                shaped="@" in about["cluster"],
            )
            train(task, recipe, record)
        if rank == 0:
            tell("done")


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(json.loads(sys.argv[1]))
    else:
        from tacit_lab.cli.interrupts import interruptible

        with interruptible():
            in_testbed(json.loads(sys.argv[1])["cluster"], [__file__, sys.argv[1]])
