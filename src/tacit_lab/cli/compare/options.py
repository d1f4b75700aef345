"""The options of `tacit compare`, parsed and checked before anything is launched."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tacit import algorithms, files
from tacit.attaching.requirements import needs_servers, uses_servers
from tacit.errors import ConfigError, unknown
from tacit.strategy import AnyStrategy
from tacit_lab import recipes
from tacit_lab.cli import parsing
from tacit_lab.cli.run.options import checked_script
from tacit_lab.cluster import Cluster
from tacit_lab.recipes import NO_CHOICES, Choices
from tacit_lab.records import BY_HUB, CHOOSING, COMPUTE_ONLY, UNDER_CHURN, RunKey
from tacit_lab.study.search import LIMITS

RECORDS = "records.jsonl"
TIMELINE = "timeline.jsonl"
PROCESSES, IN_PROCESS = "processes", "in-process"
_EXAMPLE = "write for example tacit compare --algorithms ddp,topk -- train.py --epochs 3"


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """A comparison that can be carried out.

    Attributes:
        recipe: A known recipe's name; of a script the script and its arguments.
        cluster: The cluster to emulate.
        strategies: What to compare. The `name` of each is the text that the user typed; all names differ.
        epochs: How long to train; None of a script.
        target: The accuracy to reach, 0..1; None where there is none.
        seeds: Each decides the initial weights and the order of the data.
        rates: What the learning rate is multiplied by, to choose from.
        timeout: Seconds that one algorithm may take in all.
        folder: A folder that exists and can be written.
        tensorboard: The folder for curves, which has none of these algorithms; None for no curves.
        choices: What was chosen of the recipe.
        in_process: Whether all replicas of a training are in one process, without a network.
        churn: Seconds between two replicas that are killed or frozen; None if all stay.
        script: The script and its arguments; nothing where a recipe is trained.
    """

    recipe: str
    cluster: Cluster
    strategies: tuple[AnyStrategy, ...]
    epochs: int | None
    target: float | None
    timeout: float
    folder: Path
    seeds: tuple[int, ...] = (0,)
    rates: tuple[float, ...] = (1.0,)
    script: tuple[str, ...] = ()
    tensorboard: Path | None = None
    choices: Choices = NO_CHOICES
    in_process: bool = False
    churn: float | None = None

    @cached_property
    def validation(self) -> int:
        """Samples by which learning rates are chosen; 0 of a script, whose number is not known."""
        return 0 if self.script else recipes.get(self.recipe, self.choices).validation

    @property
    def algorithms(self) -> list[str]:
        """The names of all trainings, in order: the strategies, and training without communication."""
        return [*(strategy.name for strategy in self.strategies), COMPUTE_ONLY]

    def label(self, key: RunKey) -> str:
        """What a run is called, among all others."""
        seed = f", seed {key.seed}" if len(self.seeds) > 1 or key.seed == CHOOSING else ""
        return f"{key.algorithm}{seed}{f', rate x{key.rate:g}' if len(self.rates) > 1 else ''}"

    @property
    def common(self) -> dict[str, Any]:
        """What must be equal for a comparison to be gone on with."""
        chosen = {name: str(value) for name, value in self.choices.given().items()}
        cluster = self.cluster if self.churn is None else replace(self.cluster, servers=0)  # beside a hub
        about = {"what": self.recipe, "cluster": str(cluster), "epochs": self.epochs}
        replicas = {"replicas": IN_PROCESS} if self.in_process else {}
        return {**about, "target": self.target, **chosen, **replicas}

    @property
    def records(self) -> Path:
        """The file for the records of all trainings."""
        return self.folder / RECORDS

    @property
    def description(self) -> Path:
        """The file that says what is compared."""
        return self.folder / "comparison.json"

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
    what: Sequence[str],
    cluster: Cluster,
    algorithms: str,
    epochs: int | None,
    target: float | None,
    seeds: str,
    rates: str,
    timeout: float,
    out: Path | None,
    choices: Choices = NO_CHOICES,
    replicas: str = PROCESSES,
    churn: str | None = None,
) -> CompareOptions:
    """Parse and check what was typed.

    Args:
        what: A recipe's name, or a script and its arguments.
        replicas: PROCESSES, or IN_PROCESS.
        churn: How often a replica is killed or frozen, with the unit.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    script = script_of(what)
    strategies = _strategies(algorithms)
    if replicas not in (PROCESSES, IN_PROCESS):
        raise unknown("kind of replicas", replicas, (PROCESSES, IN_PROCESS))
    if in_process := replicas == IN_PROCESS:
        _check_in_process(script, strategies, cluster.servers)
        cluster = Cluster(cluster.nodes, cluster.ranks_per_node, namespaces=cluster.namespaces)
    if churn is None:
        _check_servers(strategies, cluster.servers)
    every = None if churn is None else _churn(churn, script, strategies, cluster, in_process)
    if every is not None:
        how = BY_HUB * bool(cluster.servers) + UNDER_CHURN
        strategies = tuple(replace(each, name=each.name + how) for each in strategies)
    name = Path(script[1] if script[0] == "-m" else script[0]).stem if script else what[0]
    if script:
        refuse_choices(choices, epochs)
    else:
        recipe = recipes.get(name, choices)
        epochs = parsing.whole("--epochs", recipe.epochs if epochs is None else epochs)
        target = recipe.target if target is None else target
    return CompareOptions(
        recipe=" ".join(script) or name,
        cluster=cluster,
        strategies=strategies,
        epochs=epochs,
        target=None if target is None else _share("target", target),
        seeds=seeds_of(seeds),
        rates=rates_of(rates),
        script=script,
        timeout=parsing.seconds("--timeout", timeout, 600),
        folder=parsing.out(out, name),
        choices=choices,
        in_process=in_process,
        churn=every,
    )


def _churn(
    churn: str, script: Sequence[str], strategies: Sequence[AnyStrategy], cluster: Cluster, in_process: bool
) -> float:
    if script:
        raise ConfigError(
            f"--churn {churn} is for recipes here: write tacit run --churn {churn} -- {' '.join(script)}"
        )
    if in_process:
        raise ConfigError(f"--replicas {IN_PROCESS} has no processes to kill: leave out --churn {churn}")
    return parsing.churn(churn, cluster, strategies)


def _check_in_process(script: Sequence[str], strategies: Sequence[AnyStrategy], servers: int) -> None:
    from tacit_lab.study.replicas import refuse

    if script:
        raise ConfigError(
            f"--replicas {IN_PROCESS} is for recipes: a script decides itself how its ranks are started, so "
            "leave it out"
        )
    for strategy in strategies:
        refuse(strategy)
    if servers:
        raise ConfigError(f"--replicas {IN_PROCESS} has no parameter servers: leave out the {servers}")


def script_of(what: Sequence[str]) -> tuple[str, ...]:
    """The script and its arguments; nothing if a recipe is meant."""
    is_script = what[0] == "-m" or what[0].endswith(".py") or os.sep in what[0]
    if len(what) == 1 and not is_script:
        return ()
    if what[0] in recipes.known():
        raise ConfigError(
            f"{' '.join(what[1:])!r} follows the recipe {what[0]}: write one recipe, or a script"
        )
    return checked_script(tuple(what), _EXAMPLE)


def refuse_choices(choices: Choices, epochs: int | None) -> None:
    """Refuse for a script what only recipes have.

    Raises:
        ConfigError: one of them is given.
    """
    given = [*choices.given(), *([] if epochs is None else ["epochs"])]
    if given:
        raise ConfigError(f"--{given[0]} is for recipes: give a script its own arguments after --")


def seeds_of(text: str) -> tuple[int, ...]:
    """The seeds of --seeds, without the one by which rates are chosen.

    Raises:
        ConfigError: it is no list of seeds, or that one is among them.
    """
    seeds = parsing.seeds("--seeds", text)
    if CHOOSING in seeds:
        raise ConfigError(f"--seeds {text}: {CHOOSING} is the seed by which rates are chosen; leave it out")
    return seeds


def rates_of(text: str) -> tuple[float, ...]:
    """The rates of --rates, in order.

    Raises:
        ConfigError: it is no list of numbers, or one is not possible.
    """
    rates = sorted({*parsing.numbers("--rates", text, float)})
    if not LIMITS[0] <= rates[0] <= rates[-1] <= LIMITS[1]:
        raise ConfigError(f"--rates {text}: write numbers from 1/1024 to {LIMITS[1]:g}, e.g. 0.5,1,2")
    return tuple(rates)


def prepared(
    options: CompareOptions, tensorboard: Path | None, download: bool, tell: Callable[[str], None] = print
) -> CompareOptions:
    """Fetch the data, look at it, and make the folder, or find one to go on in.

    Args:
        tensorboard: The folder for curves.
        download: Whether the data is fetched.
        tell: Prints a note for the user.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    if tensorboard is not None:
        if options.in_process:
            raise ConfigError(f"--tensorboard {tensorboard} is for replicas in processes: leave it out")
        if options.churn is not None:
            raise ConfigError(f"--tensorboard {tensorboard} draws curves of replicas that stay: leave it out")
        options = replace(options, tensorboard=_curves(tensorboard, options.algorithms))
    if options.script:
        if download:
            raise ConfigError("--download is for recipes: leave it out")
        _make(options)
        return options
    if download:
        options = replace(options, choices=_fetched(options.recipe, options.choices, tell))
    _check_data(options, tell)
    if options.choices.precision == "bf16":
        _warn_of_bfloat16(tell)
    _make(options)
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


def _check_data(options: CompareOptions, tell: Callable[[str], None]) -> None:
    """Read the data before any rank does, and make what all of them need."""
    ranks, recipe = options.cluster.world_size, recipes.get(options.recipe, options.choices)
    recipe.prepare(tell)
    if not recipe.steps_per_epoch(ranks):
        raise ConfigError(f"{options.recipe} has too little data for {ranks} ranks: use a smaller cluster")


def _share(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"--{name} {value} must be between 0 and 1, e.g. --{name} 0.95")
    return value


def _curves(root: Path, algorithms: Sequence[str]) -> Path:
    from tacit.reporting import scalars

    scalars.check(root.absolute(), algorithms)
    return root.absolute()


def _make(options: CompareOptions) -> None:
    """Make the folder; one in which the same comparison was begun is gone on with."""
    folder, about = options.folder, options.common
    if any(os.path.lexists(folder / name) for name in (RECORDS, TIMELINE)):
        begun = _read(options.description)
        if begun is not None and {name: each for name, each in begun.items() if name != "command"} == about:
            return
        raise ConfigError(
            f"{folder} holds the records of another comparison: give another --out, or to go on with that "
            "one what it was called with"
        )
    parsing.made("--out", folder)
    files.Log(folder / RECORDS).close()
    with files.spared(f"{options.description.name} is not written, so the comparison cannot be gone on with"):
        files.put(options.description, json.dumps({**about, "command": shlex.join(["tacit", *sys.argv[1:]])}))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
