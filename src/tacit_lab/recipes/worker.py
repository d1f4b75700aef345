"""One rank of a run: `torchrun ... -m tacit_lab.recipes.worker --recipe digits --algorithm topk`.

Rank 0 prints progress messages and records, each as a line that `tacit_lab.recipes.progress` can parse.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from tacit import algorithms
from tacit.environment import CLUSTER, HUB, MEMBERS
from tacit.files import spared
from tacit.reporting import scalars
from tacit_lab import recipes
from tacit_lab.cluster import Cluster
from tacit_lab.recipes import members
from tacit_lab.recipes.curves import Curves
from tacit_lab.recipes.progress import line_of
from tacit_lab.recipes.recipe import Recipe
from tacit_lab.recipes.training import Task, train
from tacit_lab.records import COMPUTE_ONLY, Line


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Train as one rank of torchrun's group, and end the process: with exit code 1 after any error."""
    options = _parser().parse_args(argv)
    torch.set_num_threads(1)
    code = 0
    try:
        _train(options)
    except SystemExit:
        pass  # a profile or a diagnosis was wanted, and is written
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # After an error, destructors of a process group may wait for peers that will never answer; after none,
    # the interpreter would take a second to free what the system frees at once.
    os._exit(code)


def _train(options: argparse.Namespace) -> None:
    recipe = recipes.get(options.recipe, recipes.Choices.of(options))
    task = Task(
        strategy=None if options.algorithm == COMPUTE_ONLY else algorithms.parse(options.algorithm),
        epochs=options.epochs or recipe.epochs,
        seed=options.seed,
        rate=options.rate,
        target=recipe.target if options.target is None else options.target,
        cluster=os.environ.get(CLUSTER, f"local:{os.environ['WORLD_SIZE']}"),
        shaped=options.shaped,
    )
    if options.tensorboard is not None:
        scalars.check_installed()
    dist.init_process_group("gloo", timeout=time_limit(options.timeout, task, recipe))
    if MEMBERS in os.environ or HUB in os.environ:
        members.train(task, recipe, options.silence)
    elif dist.get_rank() == 0:
        curves = _curves(options)
        try:
            train(task, recipe, _print_record, curves, _print_record)
        finally:
            curves.close()
    else:
        train(task, recipe, _ignore)
    dist.destroy_process_group()


def time_limit(seconds: float, task: Task, recipe: Recipe) -> timedelta:
    """The time after which a silent peer is lost, and, where packets are, what a message takes.

    As Gloo counts from a message's start: four times what the model takes on one connection.
    """
    pace = Cluster.parse(task.cluster).pace
    if math.isfinite(pace):
        parameters = recipe.model(task.seed).parameters()
        seconds += 4 * sum(each.numel() * each.element_size() for each in parameters) / pace
    return timedelta(seconds=seconds)


def _curves(options: argparse.Namespace) -> Curves:
    if options.tensorboard is not None:
        with spared(f"curves are not drawn in {options.tensorboard}"):
            return Curves(scalars.open_writer(options.tensorboard, options.algorithm))
    return Curves()


def _print_record(record: Line) -> None:
    print(line_of(record), flush=True)


def _ignore(record: Line) -> None:
    """Does nothing, as rank 0 prints the records of all ranks."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tacit_lab.recipes.worker", description=__doc__)
    parser.add_argument("--recipe", required=True, help=f"one of {', '.join(recipes.known())}")
    recipes.Choices.add_to(parser)
    parser.add_argument("--algorithm", required=True, help=f"such as topk:ratio=0.01, or {COMPUTE_ONLY}")
    parser.add_argument("--epochs", type=int, help="default: the recipe's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=1.0, help="what the learning rate is multiplied by")
    parser.add_argument("--target", type=float, help="accuracy to reach, 0..1; default: the recipe's own")
    parser.add_argument("--tensorboard", type=Path, help="folder for curves, in one named by the algorithm")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a silent peer is lost")
    parser.add_argument("--silence", type=float, default=5, help="seconds after which a member is given up")
    parser.add_argument("--shaped", action="store_true", help="write down that the links are shaped")
    return parser


if __name__ == "__main__":
    main()
