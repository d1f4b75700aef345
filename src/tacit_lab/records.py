"""What a run writes down: one schema, one JSON object a line.

A run of one algorithm is one `RunRecord`, one `EpochRecord` for each epoch, and one `EndRecord`. A file may
hold many runs one after another; lines belong together by their algorithm, seed and rate (`key`). Of a run
that was begun again the last counts.

Seconds are training seconds: launch and evaluation are left out. Bytes are what the network interfaces of all
nodes transmitted; they are None where there is no interface between nodes to read. Where all replicas are in
one process, both are None.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    TypeAlias,
)

import tacit
from tacit.errors import ConfigError, unknown
from tacit.json_lines import VERSION, L, Line, build, is_of, parse_object, read_lines

__all__ = [
    "BY_HUB",
    "CHOOSING",
    "COMPUTE_ONLY",
    "UNDER_CHURN",
    "VERSION",
    "ChurnRecord",
    "EndRecord",
    "Environment",
    "EpochRecord",
    "Line",
    "Record",
    "RunKey",
    "RunRecord",
    "is_of",
    "parse",
    "parse_also",
    "read",
    "read_lines",
    "undisturbed",
]

COMPUTE_ONLY = "compute-only"
"""The name in place of an algorithm for a run without communication, than which nothing can be faster."""

UNDER_CHURN = " under churn"
"""What follows the name of an algorithm whose replicas come and go, as it may be trained without that."""
BY_HUB = " by a hub"
"""What stands before that, where they exchange by one."""

Status: TypeAlias = Literal["ok", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and software of a run, as far as they can change a number."""

    python: str
    torch: str
    tacit: str
    cpu: str
    cores: int
    kernel: str
    date: str

    @classmethod
    def here(cls) -> Self:
        """Describe this process's machine and packages, now."""
        return cls(
            python=platform.python_version(),
            torch=_installed("torch"),
            tacit=tacit.__version__,
            cpu=_cpu_model(),
            cores=len(os.sched_getaffinity(0)),
            kernel=platform.release(),
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
        )


CHOOSING = 1000
"""The seed of runs by which a learning rate is chosen; they count for nothing else."""


class RunKey(NamedTuple):
    """What a run is of, in a comparison.

    Attributes:
        rate: what the learning rate is multiplied by.
    """

    algorithm: str
    seed: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class _OfRun(Line):
    """A line of one run."""

    seed: int = 0
    rate: float = 1.0
    """What the learning rate was multiplied by."""

    @property
    def key(self) -> RunKey:
        """The run that the line belongs to."""
        return RunKey(self.algorithm, self.seed, self.rate)


@dataclass(frozen=True, kw_only=True)
class RunRecord(_OfRun):
    """The head of a run: everything that decides its numbers."""

    kind: ClassVar[str] = "run"
    strategy: str
    """The canonical repr of the strategy; empty where nothing is exchanged."""
    recipe: str
    """Its name; the script and its arguments, where one's own script is trained."""
    cluster: str
    shaped: bool
    """Whether the links were shaped to the cluster's rate."""
    epochs: int | None
    """None of a script, which reports when it likes."""
    target: float | None
    """The accuracy to reach, 0..1; None where there is none."""
    batch_per_rank: int | None
    """None of a script."""
    world_size: int
    parameters: int
    environment: Environment
    in_process: bool = False
    """Whether all replicas were in one process, without a network."""
    weights: float | None = None
    """The sum of the weights that a script's first rank began with."""
    churn: float | None = None
    """Seconds between two replicas that are killed or frozen; None where all stay."""

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> Self:
        inner = values.get("environment")
        if not isinstance(inner, Mapping):
            raise ConfigError("this record of kind 'run' says nothing about its environment")
        return super()._from_mapping({**values, "environment": build(Environment, inner)})


@dataclass(frozen=True, kw_only=True)
class EpochRecord(_OfRun):
    """The state of a run after an epoch, or at a script's report; all counts are from the run's start."""

    kind: ClassVar[str] = "epoch"
    epoch: int
    step: int
    seconds: float | None
    loss: float | None
    """Mean over the ranks' replicas, on held-out data; None where it was not finite, or not reported."""
    accuracy: float | None
    bytes_between_nodes: int | None
    bytes_by_count: int | None = None
    """What replicas in one process have sent, by the formulas of ring collectives."""
    consensus_distance: float | None = None
    """How far the replicas were from their mean, on average over them, as vectors of all parameters; None
    where they do not differ, and in older records."""
    consensus_relative: float | None = None
    """That, over the length of the mean."""


@dataclass(frozen=True, kw_only=True)
class EndRecord(_OfRun):
    """The outcome of a run."""

    kind: ClassVar[str] = "end"
    status: Status
    seconds: float | None = None
    steps: int | None = None
    mb_between_nodes: float | None = None
    mb_by_count: float | None = None
    """What replicas in one process have sent, by the formulas of ring collectives."""
    accuracy: float | None = None
    loss: float | None = None
    seconds_to_target: float | None = None
    """Training seconds at the first epoch's end that reached the target; None where none did."""
    validation: float | None = None
    """What learning rates are chosen by, the higher the better; None in older records."""
    training_loss: float | None = None
    """Over the last tenth of the steps; None of a script, and in older records."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The session's numbers; "servers", if it is there, is a list of what each parameter server counted, and
    "choice" what `auto` has chosen, and on what grounds."""
    traffic: list[list[int]] | None = None
    """Bytes that left each node's interface, row by row, for each other node: first the nodes with ranks,
    then the servers'. Counted before they are queued. None where nothing counts, and in older records."""
    relay_cores: float | None = None
    """The most of a core that the relay took in any second, which makes packets late; None without one."""
    relay_doubt: str | None = None
    """Why the numbers do not count, as the relay did not keep up; None where it did."""
    error: str | None = None

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> Self:
        record = super()._from_mapping(values)
        choice = record.metrics.get("choice", {"algorithm": "", "reason": ""})
        if not (isinstance(choice, dict) and all(is_of(choice.get(key), str) for key in _OF_CHOICE)):
            raise ConfigError(
                f"choice is {choice!r:.60} in the metrics of this EndRecord: write an object with "
                f"{' and '.join(_OF_CHOICE)}"
            )
        servers = record.metrics.get("servers", [])
        if not (isinstance(servers, list) and all(map(_is_of_server, servers))):
            raise ConfigError(
                f"servers is {servers!r:.60} in the metrics of this EndRecord: write a list of objects with "
                f"{', '.join(_OF_SERVERS)}"
            )
        if record.traffic is not None and not _is_square(record.traffic):
            raise ConfigError(
                f"traffic is {record.traffic!r:.60} in this EndRecord: write as many rows as nodes, each of "
                "as many whole numbers of 0 or more, or null"
            )
        return record


@dataclass(frozen=True, kw_only=True)
class ChurnRecord(_OfRun):
    """What became of the replicas of a run that come and go; seconds are since all were at work."""

    kind: ClassVar[str] = "churn"
    went: list[list[Any]]
    """Seconds, node, and "killed", "frozen" or "back"."""
    members: list[list[float]]
    """Seconds, and of how many members the period is that began then."""
    rounds: list[list[float]]
    """Seconds, and how many rounds were finished by then."""
    samples: list[list[float]]
    """Seconds, and how many samples a second all trained on since the entry before."""
    useful: int
    """Samples of finished rounds, without steps that the state of others has replaced."""
    up: float
    """Seconds from each start's first step until the replica went, or the end, summed."""

    @classmethod
    def _from_mapping(cls, values: Mapping[str, Any]) -> Self:
        record = super()._from_mapping(values)
        series = (record.members, record.rounds, record.samples)
        if not (all(map(_are_pairs, series)) and all(map(_is_of_going, record.went))):
            raise ConfigError("this record of kind 'churn' has no pairs of numbers where they must be")
        return record


def _are_pairs(points: list[Any]) -> bool:
    return all(isinstance(p, list) and len(p) == 2 and all(is_of(n, float) for n in p) for p in points)


def _is_of_going(each: Any) -> bool:
    numbers = isinstance(each, list) and len(each) == 3 and is_of(each[0], float) and is_of(each[1], int)
    return numbers and each[2] in ("killed", "frozen", "back")


_OF_CHOICE = ("algorithm", "reason")
_OF_SERVERS = {
    "server": int,
    "pushes": int,
    "push_bytes": int,
    "pull_bytes": int,
    "queue_seconds": float,
    "stale": dict,
    "late": int,
}


def _is_of_server(values: Any) -> bool:
    """Whether these are the numbers of a parameter server."""
    return (
        isinstance(values, dict)
        and all(is_of(values.get(name), kind) for name, kind in _OF_SERVERS.items())
        and all(str(age).isdecimal() and is_of(count, int) for age, count in values["stale"].items())
    )


def _is_square(rows: list[Any]) -> bool:
    """Whether this is a square matrix of counts."""
    return bool(rows) and all(
        isinstance(row, list) and len(row) == len(rows) and all(is_of(n, int) and n >= 0 for n in row)
        for row in rows
    )


Record: TypeAlias = RunRecord | EpochRecord | ChurnRecord | EndRecord
_KINDS: dict[str, type[Record]] = {
    kind.kind: kind for kind in (RunRecord, EpochRecord, ChurnRecord, EndRecord)
}


def parse(line: str) -> Record:
    """Read one line, whatever its kind.

    Raises:
        ConfigError: The line is broken or written by a newer version, or a field is not of its type.
    """
    return _parsed(line, _KINDS)


def parse_also(line: str, more: type[L]) -> Record | L:
    """Read one line that may also be of a kind that is no run's.

    Raises:
        ConfigError: As `parse`.
    """
    return _parsed(line, {**_KINDS, more.kind: more})


def _parsed(line: str, kinds: Mapping[str, type[L]]) -> L:
    values = parse_object(line)
    kind = kinds.get(values["kind"])
    if kind is None:
        raise unknown("kind of record", values["kind"], kinds)
    return kind._from_mapping(values)


def undisturbed(algorithm: str) -> str:
    """The name of an algorithm without what was done to its replicas."""
    return algorithm.removesuffix(UNDER_CHURN).removesuffix(BY_HUB)


def read(path: Path) -> Iterator[Record]:
    """Read all records of a file, in order.

    Raises:
        ConfigError: The file cannot be read, or a line of it; the message names file and line.
    """
    return read_lines(path, parse)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
