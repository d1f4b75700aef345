"""What a worker tells a parameter server of itself and its payloads, and what the server tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tacit.contracts import PayloadSpec, Topology

Rule: TypeAlias = Mapping[str, str | bool | float | tuple[float, ...]]
"""An optimizer in plain values: its "kind", and the hyper-parameters that are not the learning rate."""

Parameter: TypeAlias = tuple[str, tuple[int, ...], str, int | None]
"""Name, shape, type, and which of the rules moves it; None where workers push how far it has moved."""


@dataclass(frozen=True)
class About:
    """What all workers of a server have in common.

    Attributes:
        star: how the server is to serve.
        rules: the optimizer's groups, where the server steps.
        model: what the server has of the model.
    """

    star: Topology
    rules: tuple[Rule, ...]
    model: tuple[Parameter, ...]


@dataclass(frozen=True)
class Hello:
    """A worker's first message.

    Attributes:
        worker: its number; `workers`: how many it thinks there are.
        server: which server it takes this one for.
        process: equal for sessions of one process, and for no others.
        timeout: seconds after which a peer that does not answer is lost.
    """

    worker: int
    workers: int
    server: int
    process: str
    timeout: float
    about: About


@dataclass(frozen=True)
class Welcome:
    """The answer to it.

    Attributes:
        clocks: of each bucket that the server knows, how many pushes of the worker it has taken.
    """

    clocks: Mapping[str, int]


@dataclass(frozen=True)
class Declared:
    """How a kind of message is read, under its number from now on, and its answer.

    Attributes:
        key: of the bucket that it is about.
        back: of a worker that enters, how parameters come back to it.
    """

    key: str
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    back: PayloadSpec | None = None


Observations: TypeAlias = Mapping[str, int | float | Mapping[int, int] | None]
"""What a server has counted."""
