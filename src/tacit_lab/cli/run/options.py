"""The options of `tacit run`, parsed and checked before anything is launched."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tacit import files
from tacit.environment import ALGORITHM
from tacit.errors import ConfigError
from tacit_lab.cli import parsing
from tacit_lab.cluster import Cluster
from tacit_lab.testbed.launch import Serving

if TYPE_CHECKING:
    from tacit.strategy import AnyStrategy

DEFAULT = "ddp"
_EXAMPLE = "write for example tacit run --cluster 2x2@100mbit --algorithm topk -- train.py --epochs 3"


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A script that can be run.

    Attributes:
        script: A file that exists and parses, and its arguments, or `-m`, a module and its arguments.
        cluster: The cluster to emulate.
        strategy: What --algorithm asks for; its `name` is the text that the user typed. None if not given.
        timeout: Seconds that the run may take in all; None without limit.
        folder: A folder that exists and can be written.
        tensorboard: The folder for curves; None for no curves.
        serving: How the cluster's parameter servers are run; None if it has none.
        restarts: How often each worker, which then is a separate world, is started again. None: all workers
            are one world.
        churn: Seconds between two replicas that are killed or frozen; each is a world. None: all stay.
        profile: Whether the ranks' processor time is profiled by thread and stage.
    """

    script: tuple[str, ...]
    cluster: Cluster
    strategy: AnyStrategy | None
    timeout: float | None
    folder: Path
    tensorboard: Path | None = None
    serving: Serving | None = None
    restarts: int | None = None
    churn: float | None = None
    profile: bool = False

    @property
    def algorithm(self) -> str:
        """The text that `tacit.from_env()` parses in the script."""
        return DEFAULT if self.strategy is None else self.strategy.name

    @property
    def name(self) -> str:
        """The script without its arguments."""
        return self.script[1] if self.script[0] == "-m" else self.script[0]

    @property
    def record(self) -> Path:
        """The file for the result."""
        return self.folder / "run.json"

    @property
    def footprint(self) -> Path:
        """The folder into which every rank writes its numbers."""
        return self.folder / "ranks"


class ServerOptions(NamedTuple):
    """What was typed about parameter servers: how many, where and how often they save."""

    number: int = 0
    checkpoint: Path | None = None
    checkpoint_every: float = 30.0


NO_SERVERS = ServerOptions()


def check(
    *,
    script: Sequence[str],
    cluster: str,
    algorithm: str | None,
    timeout: float | None,
    out: Path | None,
    tensorboard: Path | None = None,
    servers: ServerOptions = NO_SERVERS,
    restarts: int | None = None,
    churn: str | None = None,
    profile: bool = False,
) -> RunOptions:
    """Parse and check what was typed. The folder is made last, if all else is right.

    Raises:
        ConfigError: Something is not possible; the message says what to write instead.
    """
    words, strategy = checked_script(tuple(script)), _strategy(algorithm)
    parsed = _cluster(cluster, servers.number, None if churn is not None else strategy)
    return RunOptions(
        script=words,
        cluster=parsed,
        strategy=strategy,
        timeout=None if timeout is None else parsing.seconds("--timeout", timeout, 600),
        tensorboard=_curves(tensorboard),
        profile=profile,
        restarts=_restarts(restarts, parsed, strategy, tensorboard),
        churn=_churn(churn, parsed, strategy, restarts, tensorboard, servers.checkpoint),
        serving=_serving(parsed, servers) if churn is None else None,
        folder=_folder(parsing.out(out, "run")),
    )


def checked_script(words: tuple[str, ...], example: str = _EXAMPLE) -> tuple[str, ...]:
    """A script that exists and parses, or `-m` and a module; and its arguments.

    Raises:
        ConfigError: it does not.
    """
    if not words:
        raise ConfigError(f"no script was given: {example}")
    if words[0] == "-m":
        if len(words) == 1:
            raise ConfigError(f"no module was given after -m: {example}, or -m package.train --epochs 3")
        if not _is_module(words[1]):
            raise ConfigError(f"there is no module {words[1]!r}: run tacit where python -m {words[1]} works")
    elif words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} is in the place of the script: {example}")
    elif not os.path.isfile(words[0]):  # also False if a name is too long
        raise ConfigError(f"there is no script {words[0]!r} in {Path.cwd()}: {example}")
    elif words[0].endswith(".py"):
        _check_syntax(Path(words[0]))
    return words


def _is_module(name: str) -> bool:
    """Whether this module exists, here or where Python looks, or at least its top-level package does."""
    top = name.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    return bool(PathFinder.find_spec(top, [str(Path.cwd())]) or find_spec(top))


def _check_syntax(script: Path) -> None:
    """Refuse a script that Python cannot parse: else every rank would fail, after the cluster was made."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(script.read_bytes(), str(script), "exec")
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise ConfigError(f"{script} is no Python program, {where}{error.msg}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{script} cannot be read as a Python program: {error}") from error


def _strategy(algorithm: str | None) -> AnyStrategy | None:
    from tacit import algorithms

    if algorithm is not None:
        return algorithms.parse(algorithm)
    inherited = os.environ.get(ALGORITHM, DEFAULT)
    if inherited != DEFAULT:
        raise ConfigError(
            f"{ALGORITHM}={inherited} is set, but tacit run sets that variable itself: write "
            f"--algorithm {inherited}, or unset it to run {DEFAULT}"
        )
    return None


def _cluster(text: str, servers: int, strategy: AnyStrategy | None) -> Cluster:
    from tacit.attaching.requirements import needs_servers, uses_servers

    cluster = parsing.cluster(text, servers)
    if strategy is None:
        return cluster
    if needs_servers(strategy) and not cluster.servers:
        raise ConfigError(f"{strategy.name} needs a parameter server, and there is none: write --servers 1")
    if cluster.servers and not uses_servers(strategy):
        raise ConfigError(
            f"{cluster.servers} servers would do nothing with --algorithm {strategy.name}, which needs none: "
            "leave them out, or write --algorithm ps, say"
        )
    return cluster


def _serving(cluster: Cluster, servers: ServerOptions) -> Serving | None:
    checkpoint = servers.checkpoint
    parsing.seconds("--checkpoint-every", servers.checkpoint_every, 30)
    if not cluster.servers:
        if checkpoint is not None:
            raise ConfigError(
                f"--checkpoint {checkpoint} is for parameter servers, and there are none: leave it out, or "
                "write --servers 1 and an algorithm that needs one"
            )
        return None
    serving = Serving(every=servers.checkpoint_every)
    if checkpoint is None:
        return serving
    serving = replace(serving, checkpoint=checkpoint.absolute())
    _check_files(checkpoint, serving, cluster.servers)
    return serving


def _restarts(
    count: int | None, cluster: Cluster, strategy: AnyStrategy | None, curves: Path | None
) -> int | None:
    if count is None:
        return None
    parsing.whole("--restarts", count, least=0)
    from tacit.attaching.requirements import needs_servers

    name = DEFAULT if strategy is None else strategy.name
    alone = strategy is not None and all(level.independent for level in strategy.levels)
    if strategy is None or not (alone and needs_servers(strategy)):
        raise ConfigError(
            f"--restarts {count} is for workers that go on without each other, and those of {name} do not: "
            "write --algorithm ps-async, say, or leave it out"
        )
    if not cluster.namespaces or cluster.ranks_per_node > 1:
        raise ConfigError(
            f"--restarts {count} with --cluster {cluster} is not possible, as a worker needs its own node: "
            f"write --cluster {cluster.world_size}x1"
        )
    if curves is not None:
        raise ConfigError(
            f"--restarts {count} with --tensorboard {curves} is not possible, as all would write the same "
            "curves: leave one out"
        )
    return count


def _churn(
    text: str | None,
    cluster: Cluster,
    strategy: AnyStrategy | None,
    restarts: int | None,
    curves: Path | None,
    checkpoint: Path | None,
) -> float | None:
    if text is None:
        return None
    for option, given in (
        *(("--restarts", restarts), ("--tensorboard", curves)),
        ("--checkpoint", checkpoint),
    ):
        if given is not None:
            raise ConfigError(f"--churn {text} with {option} {given} is not possible: leave one out")
    return parsing.churn(text, cluster, () if strategy is None else (strategy,))


def _check_files(folder: Path, serving: Serving, servers: int) -> None:
    """Refuse a folder with the checkpoints of another number of servers: each holds a part of the model."""
    parsing.made("--checkpoint", folder)
    found = {file.name for file in folder.glob("server*.pt")}
    wanted = {serving.name(number) for number in range(servers)}
    if found and found != wanted:
        raise ConfigError(
            f"--checkpoint {folder} holds {', '.join(sorted(found))}, and {servers} servers go on from "
            f"{', '.join(sorted(wanted))}: write the same number of --servers, or another folder"
        )


def _curves(root: Path | None) -> Path | None:
    if root is None:
        return None
    from tacit.reporting import scalars

    scalars.check(root, ())
    return root.absolute()


def _folder(folder: Path) -> Path:
    files.folder(folder, "--out")
    record, ranks = folder / "run.json", folder / "ranks"
    if os.path.lexists(record) or os.path.lexists(ranks):
        raise ConfigError(
            f"{folder} holds the record of another run: give another --out"
            if _is_whole(record)
            else f"{folder} holds what is left of a run that goes on or was cut off: give another --out, or "
            f"remove {record} and {ranks}"
        )
    parsing.made("--out", ranks)
    return folder


def _is_whole(record: Path) -> bool:
    """Whether this file holds the result of a run that has ended."""
    try:
        told = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(told, dict) and told.get("status") != "unfinished"
