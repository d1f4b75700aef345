"""The papers' own comparisons, in small: their claims next to what is measured here.

    python benchmarks/papers.py daso            # under an hour
    python benchmarks/papers.py daso --quick    # under 10 minutes, of digits; judges nothing
    python benchmarks/papers.py all             # everything; over 4 hours on 2 cores
    python benchmarks/papers.py daso --quick --times --links 100mbit,30ms   # a minute or two: times alone

An experiment is one of ednncomm, daso, mp2, dgc, powersgd and diloco. Its algorithms are trained from 3 seeds
on 2 nodes of 2 ranks and on 4 nodes of 1, with links at full speed; times come from windows on links of 100
Mbit/s (windows.py), and one run of each algorithm is made whole there, to see whether windows tell the truth.
Images are those of CIFAR-10, from --data or where they are found; without them digits take their place.

Each run and each window is a line in benchmarks/results/papers-runs-2.jsonl and papers-windows-2.jsonl; the
same command goes on where it was interrupted, and experiments share their runs. The page is
benchmarks/results/DATE-papers-EXPERIMENT.md. With --quick all of it is kept in tacit-out/. What is measured
of MP², and how, says mp2.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import mp2
import windows
from comparing import images_or
from experiments import EXPERIMENTS, LINKS, Scale, runs, settled, whole_runs
from experiments import windows as windows_of
from grid import RUNS, Done, Run, carry_out, held, paired
from launched import refuse_early
from paired import RESULTS
from paper_page import Evidence, page
from tacit.files import put
from together import together

FILE, WINDOWS = "papers-runs-2.jsonl", "papers-windows-2.jsonl"
"""Those without a number hold runs of what some names stood for before: topk and dgc in two phases, say."""
QUICK_SEEDS, QUICK_BLOCKS = 2, 2
CLUSTER = "2x2@100mbit"
"""One that must be possible for anything here."""


def execute(group: Run, algorithms: Sequence[str]) -> Iterator[Done]:
    """Recipes as `tacit compare` trains them, and what it does not have by loops of our own."""
    if group.recipe[0] == "gan" or group.recipe[0].startswith("optimizer:"):
        from loops import by_loop

        return by_loop(group, algorithms)
    return together(group, algorithms)


def trained(name: str, scale: Scale, file: Path) -> list[Run]:
    """The runs on fast links, in the precision in which they have been made, or else the faster one."""
    experiment = EXPERIMENTS[name]
    return runs(experiment, settled(scale, lambda each: runs(experiment, each), held(file)))


def timed(name: str, scale: Scale, folder: Path) -> Scale:
    """The same of windows and whole runs, which are to be in one precision."""
    experiment = EXPERIMENTS[name]
    return settled(
        scale,
        lambda each: [*whole_runs(experiment, each), *windows_of(experiment, each)],
        [*held(folder / FILE), *windows.held(folder / WINDOWS)],
    )


def carried_out(name: str, scale: Scale, folder: Path, command: str) -> dict[str, Any]:
    """Measure what is missing, and write the page."""
    experiment = EXPERIMENTS[name]
    file = folder / FILE
    wanted = trained(name, scale, file)
    on_links = timed(name, scale, folder)
    evidence = Evidence(
        found=windows.carry_out(windows_of(experiment, on_links), folder / WINDOWS),
        whole=carry_out(whole_runs(experiment, on_links), file, execute),
        done=carry_out(wanted, file, execute),
        wanted=len(wanted),
        command=command,
        quick=scale.quick,
    )
    path = folder / f"{date.today().isoformat()}-papers-{name}.md"
    put(path, page(experiment, evidence))
    print(f"wrote {path}", file=sys.stderr)
    return {"experiment": name, "page": str(path), "accuracy": paired(evidence.done)}


def scaled(options: argparse.Namespace) -> Scale:
    """How much is asked for."""
    if options.quick:
        return Scale(QUICK_SEEDS, QUICK_BLOCKS, quick=True, links=options.links)
    data = images_or("digits take their place", options.data)
    return Scale(data=str(data) if data else None)


def of_mp2(options: argparse.Namespace, command: str) -> dict[str, Any]:
    """The same of MP², whose runs have a parameter server."""
    folder = RUNS if options.quick else RESULTS
    found = mp2.found(options.quick, None, mp2.images_for(options.quick, None, options.data), folder)
    path = mp2.written(found, command, folder)
    return {"experiment": "mp2", "page": str(path), "accuracy": found.rows}


def main() -> None:
    """Measure, and write the pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "mp2", "all"])
    parser.add_argument("--data", help="CIFAR-10, as `tacit compare cifar10 --data` takes it")
    parser.add_argument("--quick", action="store_true", help="a few minutes of digits, to see that it works")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on stdout")
    parser.add_argument("--links", default=LINKS, help="of --quick, e.g. 100mbit,30ms,0.1%%loss")
    parser.add_argument("--times", action="store_true", help="of --quick: only time steps, and write no page")
    options = parser.parse_args()
    if (options.links != LINKS or options.times) and not options.quick:
        parser.error("--links and --times are of --quick: write it too, or leave them out")
    if options.times and options.experiment == "mp2":
        parser.error("--times is of all experiments but mp2, whose steps are timed as it trains")
    if options.quick and options.data:
        parser.error("--quick trains digits, and --data would do nothing: leave one of them out")
    names = [*EXPERIMENTS, "mp2"] if options.experiment == "all" else [options.experiment]
    refuse_early(CLUSTER)
    words = [Path(each).name for each in sys.argv]  # where the images lie is not for the page
    command = f"python benchmarks/{' '.join(words)}"
    folder = RUNS if options.quick else RESULTS
    folder.mkdir(exist_ok=True)
    of_grid = [name for name in names if name in EXPERIMENTS]
    scale = scaled(options) if of_grid else None
    if scale and options.times:
        windows.carry_out(
            [each for name in of_grid for each in windows_of(EXPERIMENTS[name], scale)], folder / WINDOWS
        )
        return
    if scale and len(of_grid) > 1:  # what experiments share is trained in one call
        path = folder / FILE
        carry_out([run for name in of_grid for run in trained(name, scale, path)], path, execute)
    found = [carried_out(name, scale, folder, command) for name in of_grid if scale]
    found += [of_mp2(options, command)] if "mp2" in names else []
    if options.json:
        told = {"benchmark": "papers", "quick": options.quick, "experiments": found}
        print(json.dumps(told, default=asdict))


if __name__ == "__main__":
    main()
