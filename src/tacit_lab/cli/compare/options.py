"""The options of `tacit compare`, parsed and checked before anything is launched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tacit import algorithms, files
from tacit.attaching.requirements import needs_servers, uses_servers
from tacit.errors import ConfigError
from tacit.strategy import AnyStrategy
from tacit_lab import recipes
from tacit_lab.cli import parsing
from tacit_lab.cluster import Cluster
from tacit_lab.recipes import NO_CHOICES, Choices
from tacit_lab.records import COMPUTE_ONLY

RECORDS = "records.jsonl"
TIMELINE = "timeline.jsonl"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """A comparison that can be carried out.

    Attributes:
        recipe: A known recipe's name.
        cluster: The cluster to emulate.
        strategies: What to compare. The `name` of each is the text that the user typed; all names differ.
        epochs: How long to train.
        target: The accuracy to reach, 0..1.
        seed: Decides the initial weights and the order of the data.
        timeout: Seconds that one algorithm may take in all.
        folder: A folder that exists and can be written.
        tensorboard: The folder for curves, which has none of these algorithms; None for no curves.
        choices: What was chosen of the recipe.
    """

    recipe: str
    cluster: Cluster
    strategies: tuple[AnyStrategy, ...]
    epochs: int
    target: float
    seed: int
    timeout: float
    folder: Path
    tensorboard: Path | None = None
    choices: Choices = NO_CHOICES

    @property
    def algorithms(self) -> list[str]:
        """The names of all trainings, in order: the strategies, and training without communication."""
        return [*(strategy.name for strategy in self.strategies), COMPUTE_ONLY]

    @property
    def records(self) -> Path:
        """The file for the records of all trainings."""
        return self.folder / RECORDS

    @property
    def timeline(self) -> Path:
        """The file for the ranks' timelines."""
        return self.folder / TIMELINE

    @property
    def output(self) -> Path:
        """The file for what the ranks print."""
        return self.folder / "output.log"


def check(
    *,
    recipe: str,
    cluster: Cluster,
    algorithms: str,
    epochs: int | None,
    target: float | None,
    seed: int,
    timeout: float,
    out: Path | None,
    choices: Choices = NO_CHOICES,
) -> CompareOptions:
    """Parse and check what was typed.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    chosen = recipes.get(recipe, choices)
    strategies = _strategies(algorithms)
    _check_servers(strategies, cluster.servers)
    return CompareOptions(
        recipe=recipe,
        cluster=cluster,
        strategies=strategies,
        epochs=parsing.whole("--epochs", chosen.epochs if epochs is None else epochs),
        target=_share("target", chosen.target if target is None else target),
        seed=parsing.seed("--seed", seed),
        timeout=parsing.seconds("--timeout", timeout, 600),
        folder=(out or parsing.OUT / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe}").absolute(),
        choices=choices,
    )


def prepared(
    options: CompareOptions, tensorboard: Path | None, download: bool, tell: Callable[[str], None] = print
) -> CompareOptions:
    """Fetch the data, look at it, and make the folder.

    Args:
        tensorboard: The folder for curves.
        download: Whether the data is fetched.
        tell: Prints a note for the user.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    if tensorboard is not None:
        options = replace(options, tensorboard=_curves(tensorboard, options.algorithms))
    if download:
        options = replace(options, choices=_fetched(options.recipe, options.choices, tell))
    _check_data(options)
    if options.choices.precision == "bf16":
        _warn_of_bfloat16(tell)
    _make(options.folder)
    return options


def _strategies(text: str) -> tuple[AnyStrategy, ...]:
    """A strategy for each algorithm of a list with commas."""
    names = parsing.split_algorithms(text)
    strategies = []
    for name in names:
        if name == COMPUTE_ONLY:
            raise ConfigError(f"{COMPUTE_ONLY} is always trained besides the algorithms: leave it out")
        if names.count(name) > 1:
            raise ConfigError(f"{name!r} is listed twice: name each algorithm once")
        strategies.append(algorithms.parse(name))
    return tuple(strategies)


def _check_servers(strategies: Sequence[AnyStrategy], servers: int) -> None:
    needy = [strategy.name for strategy in strategies if needs_servers(strategy)]
    if needy and not servers:
        raise ConfigError(f"{needy[0]} needs a parameter server, and there is none: write --servers 1")
    if servers and not any(map(uses_servers, strategies)):
        names = ", ".join(strategy.name for strategy in strategies)
        raise ConfigError(
            f"{servers} servers would do nothing, as none of {names} needs one: leave them out, "
            "or compare ps, say"
        )


def _fetched(recipe: str, choices: Choices, tell: Callable[[str], None]) -> Choices:
    if choices.data is not None:
        raise ConfigError(f"--data {choices.data} and --download exclude each other: leave one out")
    return replace(choices, data=recipes.fetch(recipe, tell))


def _warn_of_bfloat16(tell: Callable[[str], None]) -> None:
    from tacit_lab.recipes.models import precision  # it imports torch

    if not precision.is_native():
        tell(
            "Note: torch knows no instructions for bf16 on this CPU, and is many times slower in it than in "
            "fp32; --precision fp32 is faster here"
        )


def _check_data(options: CompareOptions) -> None:
    """Read the data before any rank does."""
    ranks = options.cluster.world_size
    if not recipes.get(options.recipe, options.choices).steps_per_epoch(ranks):
        raise ConfigError(f"{options.recipe} has too little data for {ranks} ranks: use a smaller cluster")


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name} {value} must be between 0 and 1, e.g. --{name} 0.95")
    return value


def _curves(root: Path, algorithms: Sequence[str]) -> Path:
    from tacit.reporting import scalars

    scalars.check(root.absolute(), algorithms)
    return root.absolute()


def _make(folder: Path) -> None:
    if any(os.path.lexists(folder / name) for name in (RECORDS, TIMELINE)):
        raise ConfigError(f"{folder} holds the records of another comparison: give another --out")
    files.folder(folder, "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --out {folder}: {error.strerror}") from error
    files.Log(folder / RECORDS).close()
