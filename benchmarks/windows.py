"""Step times on a shaped link, from windows of training: what a whole run takes is foretold from them.

What an algorithm of lockstep trains does not depend on the network, so its accuracy may come from a run on
links at full speed, and the time of a step from a window here. A window is a block of steps that holds what
comes back: a period of rounds, an epoch, or a few steps where all are alike. All algorithms of a window run
interleaved in one launch, with `compute-only` and the baseline; where a cluster has parameter servers, which
serve one session, each has a launch of its own. What a window has found is a line of JSON, and is not
measured again.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launched import in_testbed, tell
from paired import Ticks, hardware
from runs import COMPUTE_ONLY, FOREVER, Run, append, lines

if TYPE_CHECKING:
    from arms import Work

ALIKE = 3
"""Steps in a block where all are alike."""
WARM = 4
"""Steps before the first block: buckets settle in the fourth round."""
TOGETHER = 8
"""Algorithms in one launch, for memory's sake, besides `compute-only`."""
FIRST, LONGEST = "the first rank", "the rank that took longest"
"""Whose seconds a window holds; of the first where it does not say, as none did once."""
SLOW = 0.1
"""What learning rates are multiplied by: a window begins where a run has its warm-up."""


@dataclass(frozen=True)
class Part:
    """A part of a run in which its steps are alike, or come back alike.

    Attributes:
        text: what is attached to measure it.
        share: of all steps, 0..1.
        block: how many steps a window of it has.
    """

    text: str
    share: float
    block: int = ALIKE


def parts(algorithm: str, epochs: int, steps: int) -> list[Part]:
    """What a run of so many epochs of so many steps is made of; first what a long run has most of."""
    from tacit import algorithms
    from tacit.algorithms.options.warmups import WARMUP
    from tacit.rounds import Cycling, Every, EveryEpoch

    name, given = _words(algorithm)
    warmup = int(given.pop("warmup_steps", 0))
    if warmup:
        usual = inspect.signature(algorithms.ALGORITHMS[name]).parameters["ratio"].default
        share, ratio = warmup / (epochs * steps), float(given.get("ratio", usual))
        early = [_text(name, {**given, "ratio": max(ratio, each)}) for each in WARMUP]
        return [Part(_text(name, given), 1 - share), *(Part(each, share / len(early)) for each in early)]
    rounds = algorithms.parse(algorithm).levels[-1].rounds
    if isinstance(rounds, Every):
        return [Part(algorithm, 1.0, -(-ALIKE // rounds.sync_every) * rounds.sync_every)]
    if isinstance(rounds, EveryEpoch):
        return [Part(algorithm, 1.0, steps)]
    if not isinstance(rounds, Cycling):
        return [Part(algorithm, 1.0)]
    phases = rounds.phases({**rounds.start(), "epochs": float(epochs), "steps_per_epoch": float(steps)})
    cycling = sum(each for each, late in phases if late) / (epochs * steps)
    late, blocking = (
        _text(name, {**given, "warmup_epochs": epochs, "cooldown_epochs": 0}) for epochs in (0, FOREVER)
    )
    found = [Part(late, cycling, steps)]
    return [*found, Part(blocking, 1 - cycling)] if cycling < 1 else found


def _words(algorithm: str) -> tuple[str, dict[str, Any]]:
    """The name, and what is given behind it."""
    name, _, rest = algorithm.partition(":")
    return name, dict(word.split("=") for word in rest.split(",") if word)


def _text(name: str, given: Mapping[str, Any]) -> str:
    return f"{name}:{','.join(f'{key}={value}' for key, value in given.items())}" if given else name


@dataclass(frozen=True)
class Window:
    """What is measured in one launch.

    Attributes:
        run: recipe, cluster and epochs.
        algorithms: the baseline first.
        blocks: how many of each.
    """

    run: Run
    algorithms: tuple[str, ...]
    blocks: int

    @property
    def key(self) -> Window:
        """What is equal of equal windows."""
        return replace(self, run=self.run.key)


def plan(run: Run, algorithms: Sequence[str], blocks: int) -> list[Window]:
    """Windows for all algorithms, the first of which is the baseline and in each of them."""
    base, *others = dict.fromkeys(algorithms)
    pieces = [others[i : i + TOGETHER - 1] for i in range(0, len(others), TOGETHER - 1)]
    return [Window(run, (base, *piece), blocks) for piece in pieces or [[]]]


@dataclass(frozen=True)
class Found:
    """What a window has found: seconds a step in each block and MB a step and node, by algorithm.

    Attributes:
        steps: of an epoch.
        parts: algorithm -> its parts, each as the share, the seconds a step of each block, and the MB.
        error: why there is nothing.
        of: which rank's seconds they are.
        withheld: the share of the processors' time (`paired.Ticks`); None where nobody looked.
        state: of the code, as the caller of `carry_out` tells states apart; "" where it does not.
    """

    window: Window
    steps: int
    parts: Mapping[str, list[tuple[float, list[float], float]]]
    hardware: Mapping[str, object]
    error: str | None = None
    of: str = FIRST
    withheld: float | None = None
    state: str = ""

    def seconds(self, algorithm: str) -> float:
        """A step's, over the whole run."""
        return sum(share * statistics.median(each) for share, each, _ in self.parts[algorithm])

    def megabytes(self, algorithm: str) -> float:
        """10^6 bytes a step that a node's interface sends, over the whole run."""
        return sum(share * sent for share, _, sent in self.parts[algorithm])

    def steady(self, algorithm: str) -> tuple[float, float]:
        """Seconds and 10^6 bytes a step in the part that a long run has most of."""
        _, seconds, sent = self.parts[algorithm][0]
        return statistics.median(seconds), sent

    def to_json(self) -> str:
        """A line without its end."""
        return json.dumps(asdict(replace(self, window=self.window.key)))

    @classmethod
    def from_json(cls, line: str) -> Found:
        """Read a line back."""
        values = json.loads(line)
        about = values["window"]
        run = Run(**{**about["run"], "recipe": tuple(about["run"]["recipe"])})
        window = Window(run, tuple(about["algorithms"]), about["blocks"])
        return cls(**{**values, "window": window})


def read(path: Path) -> list[Found]:
    """What the file holds, the last of each window."""
    return list({found.window: found for found in lines(path, Found.from_json)}.values())


def held(path: Path) -> dict[Window, Found]:
    """What the file holds of windows in which something was found, the last of each."""
    return {found.window: found for found in lines(path, Found.from_json) if found.error is None}


def carry_out(
    windows: Sequence[Window],
    path: Path,
    measure: Callable[[Window], Found] | None = None,
    state: str = "",
) -> list[Found]:
    """Measure the windows that the file does not hold of this state of the code; all that are asked for."""
    there = {window for window, found in held(path).items() if found.state == state}
    for window in windows:
        if window.key in there:
            continue
        print(f"window: {' '.join(window.run.recipe)} on {window.run.cluster}", file=sys.stderr, flush=True)
        found = replace((measure or measured)(window), state=state)
        append(path, found.to_json())
        for algorithm in found.parts:
            print(f"  {algorithm}: {1e3 * found.seconds(algorithm):.1f} ms a step", file=sys.stderr)
        if found.error is not None:
            print(f"  failed: {found.error}", file=sys.stderr)
    asked = {window.key for window in windows}
    return [found for found in read(path) if found.window in asked]


def measured(window: Window) -> Found:
    """Measure one window in the testbed."""
    from tacit_lab import recipes
    from tacit_lab.cluster import Cluster
    from tacit_lab.testbed import Serving

    recipe = recipes.get(window.run.recipe[0], choices(window.run.recipe))
    steps = recipe.steps_per_epoch(Cluster.parse(window.run.cluster).world_size)
    epochs = window.run.epochs or recipe.epochs
    split = {COMPUTE_ONLY: [Part(COMPUTE_ONLY, 1.0)]}
    split |= {each: parts(each, epochs, steps) for each in window.algorithms}
    arms = list({part.text: part for each in split.values() for part in each}.values())
    about, before = hardware(), Ticks.now()
    told = {"recipe": window.run.recipe, "steps": steps, "blocks": window.blocks}
    found: dict[str, Any] = {}
    served = "+" in window.run.cluster
    try:
        for some in [[arm] for arm in arms] if served else [arms]:
            words = [__file__, "--rank", json.dumps({**told, "arms": [asdict(arm) for arm in some]})]
            servers = Serving() if served and _at_servers(some[0].text) else None
            found |= in_testbed(window.run.cluster, words, servers=servers, timeout=3000)
    except SystemExit as error:
        return Found(window, steps, {}, about, str(error))
    return Found(
        window,
        steps,
        {name: [(part.share, *found[part.text]) for part in each] for name, each in split.items()},
        about,
        of=LONGEST,
        withheld=(Ticks.now() - before).withheld,
    )


def _at_servers(algorithm: str) -> bool:
    """Whether it uses parameter servers where there are some."""
    from tacit import algorithms
    from tacit.attaching.requirements import uses_servers

    return algorithm != COMPUTE_ONLY and uses_servers(algorithms.parse(algorithm))


# ---- in a rank ----------------------------------------------------------------------------------------


def rank_main(told: Mapping[str, Any]) -> None:
    """Measure all arms; rank 0 prints seconds a step of each block, and MB a step that its node has sent."""
    from arms import Blocks, Trainer, ranks, timed

    epochs = (FOREVER, told["steps"])
    with ranks() as rank:
        arms = {
            arm["text"]: Blocks(Trainer(arm["text"], epochs=epochs, work=_work(told["recipe"])), arm["block"])
            for arm in told["arms"]
        }
        for arm in arms.values():
            if arm.steps < told["steps"]:  # an epoch is its own warm-up, as its first steps are few of many
                arm.trainer.steps(max(WARM, arm.steps))
        seconds = timed(arms, told["blocks"])
        if rank == 0:
            tell({text: [seconds[text], arm.megabytes] for text, arm in arms.items()})
        for arm in arms.values():
            arm.trainer.close()


def choices(words: Sequence[str]) -> Any:
    """What a recipe is given, as `tacit compare` takes it behind the recipe's name."""
    from tacit_lab.recipes import Choices

    parser = argparse.ArgumentParser()
    Choices.add_to(parser)
    return Choices.of(parser.parse_args([*words[1:]]))


def _work(words: Sequence[str]) -> Work:
    """A recipe's model, on its own batches, as `tacit compare` trains it."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from arms import Work
    from tacit_lab import recipes

    recipe = recipes.get(words[0], choices(words))

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for epoch in count():
            yield from recipe.train_batches(epoch, dist.get_rank(), dist.get_world_size(), seed=0)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = recipe.optimizer(model)
        for group in made.param_groups:
            group["lr"] *= SLOW
        return made

    return Work(recipe.model(0), optimizer, partial(next, batches()), recipe.loss)


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[2]))
