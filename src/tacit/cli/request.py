"""Check everything that a comparison needs before anything is built."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tacit import algorithms, files
from tacit.cli import texts
from tacit.errors import ConfigError
from tacit.lab import recipes
from tacit.lab.cluster import Cluster
from tacit.lab.recipes import NO_CHOICES, Choices
from tacit.lab.records import COMPUTE_ONLY, Writer
from tacit.parameter_server import placement

__all__ = ["Request", "check"]

RECORDS = "records.jsonl"
TIMELINE = "timeline.jsonl"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A comparison that can be carried out.

    Attributes:
        recipe: A known recipe's name.
        cluster: The cluster to emulate.
        algorithms: Texts that parse, all different.
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
    algorithms: tuple[str, ...]
    epochs: int
    target: float
    seed: int
    timeout: float
    folder: Path
    tensorboard: Path | None = None
    choices: Choices = NO_CHOICES

    @property
    def records(self) -> Path:
        """The file that all runs append to."""
        return self.folder / RECORDS

    @property
    def timeline(self) -> Path:
        """The file that takes what the ranks were doing when."""
        return self.folder / TIMELINE

    @property
    def output(self) -> Path:
        """The file that takes what the ranks print."""
        return self.folder / "output.log"


def check(
    *,
    recipe: str,
    cluster: str,
    algorithms: str,
    epochs: int | None,
    target: float | None,
    seed: int,
    timeout: float,
    out: Path | None,
    tensorboard: Path | None = None,
    servers: int = 0,
    choices: Choices = NO_CHOICES,
    download: bool = False,
    tell: Callable[[str], None] = print,
) -> Request:
    """Turn what was typed into a request; data is fetched and the folder made last, when all else is right.

    Raises:
        ConfigError: Something cannot be; the message says what to write instead.
    """
    chosen = recipes.get(recipe, choices)
    parsed = with_servers(Cluster.parse(cluster), servers)
    names = _algorithms(algorithms)
    _check_servers(names, parsed.servers)
    request = Request(
        recipe=recipe,
        cluster=parsed,
        algorithms=names,
        epochs=texts.whole("--epochs", chosen.epochs if epochs is None else epochs),
        target=_share("target", chosen.target if target is None else target),
        seed=texts.seed("--seed", seed),
        timeout=texts.seconds("--timeout", timeout, 600),
        folder=(out or Path("tacit-out") / f"{datetime.now():%Y%m%d-%H%M%S}-{recipe}").absolute(),
        tensorboard=_curves(tensorboard, names),
        choices=choices,
    )
    if download:
        request = replace(request, choices=_fetched(recipe, choices, tell))
    _check_data(request)
    if choices.precision == "bf16":
        _warn_of_bfloat16(tell)
    _make(request.folder)
    return request


def _fetched(recipe: str, choices: Choices, tell: Callable[[str], None]) -> Choices:
    if choices.data is not None:
        raise ConfigError(f"--data {choices.data} and --download were both given: leave one out")
    return replace(choices, data=recipes.fetch(recipe, tell))


def _warn_of_bfloat16(tell: Callable[[str], None]) -> None:
    from tacit.lab.recipes.models import precision  # it imports torch

    if not precision.is_native():
        tell(
            "Note: torch knows no instructions for bf16 on this CPU, and is many times slower in it than in "
            "fp32; --precision fp32 is faster here"
        )


def _check_data(request: Request) -> None:
    """Read the data before any rank does."""
    ranks = request.cluster.world_size
    if not recipes.get(request.recipe, request.choices).steps_per_epoch(ranks):
        raise ConfigError(f"{request.recipe} has too little data for {ranks} ranks: use a smaller cluster")


def _algorithms(text: str) -> tuple[str, ...]:
    names = texts.split_algorithms(text)
    for each in names:
        if each == COMPUTE_ONLY:
            raise ConfigError(f"{COMPUTE_ONLY} is always trained beside the algorithms: leave it out")
        if names.count(each) > 1:
            raise ConfigError(f"{each!r} is listed twice: name each algorithm once")
        algorithms.parse(each)
    return tuple(names)


def with_servers(cluster: Cluster, servers: int) -> Cluster:
    """The cluster, with so many parameter servers beside its nodes; as its text says where 0.

    Raises:
        ConfigError: the number cannot be.
    """
    if servers < 0:
        raise ConfigError(f"--servers {servers} cannot be: write how many there are, such as --servers 1")
    if servers and cluster.servers:
        raise ConfigError(
            f"--servers {servers} and --cluster {cluster} both say how many servers there are: leave one out"
        )
    return replace(cluster, servers=servers) if servers else cluster


def needs_servers(algorithm: str) -> bool:
    """Whether an algorithm's text, which parses, needs parameter servers."""
    return placement.needs_servers(algorithms.parse(algorithm))


def takes_servers(algorithm: str) -> bool:
    """Whether an algorithm's text, which parses, uses parameter servers where there are some."""
    return placement.uses_servers(algorithms.parse(algorithm))


def _check_servers(names: Sequence[str], servers: int) -> None:
    needy = [name for name in names if needs_servers(name)]
    if needy and not servers:
        raise ConfigError(f"{needy[0]} needs a parameter server, and there is none: write --servers 1")
    if servers and not any(takes_servers(name) for name in names):
        raise ConfigError(
            f"{servers} servers would do nothing, as none of {', '.join(names)} needs one: leave them out, "
            "or compare ps, say"
        )


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name} {value} must be between 0 and 1, e.g. --{name} 0.95")
    return value


def _curves(root: Path | None, names: Sequence[str]) -> Path | None:
    if root is None:
        return None
    from tacit.hooks import scalars

    scalars.check(root.absolute(), [*names, COMPUTE_ONLY])
    return root.absolute()


def _make(folder: Path) -> None:
    if any(os.path.lexists(folder / name) for name in (RECORDS, TIMELINE)):
        raise ConfigError(f"{folder} holds the records of another comparison: give another --out")
    files.folder(folder, "--out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --out {folder}: {error.strerror}") from error
    Writer(folder / RECORDS).close()
