"""How much memory a worker may have a server use: what its model needs, and not more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from tacit.errors import AttachError, PayloadError
from tacit.stores.messages import MessageSpec, ParameterSpec, PayloadBuffer

_TYPES = {
    str(dtype).removeprefix("torch."): dtype.itemsize
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
_BESIDE = 1 << 20
"""Entries, or bytes, that a message may have besides those of parameters: flags, scales, averaged numbers."""
_TIMES = 4
"""How many times as long as all of the model one message may be."""
_ALL_TIMES = 64
"""The same for all declared messages of one worker together: pushes and answers, each phase, part and stage.
"""
_DECLARED_A_PARAMETER, _DECLARED_BESIDE = 64, 1024


@dataclass
class WorkerLimits:
    """The limits of one worker, and how much of them it has used.

    Attributes:
        model: its parameters.
        names: of the parameters; the keys of buckets begin with one.
        nbytes, entries: of all of them.
        count: how many messages were declared; `total`, of how many bytes together.
    """

    model: Sequence[ParameterSpec]
    names: frozenset[str] = field(init=False)
    nbytes: int = field(init=False)
    entries: int = field(init=False)
    count: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        self.names = frozenset(name for name, *_ in self.model)
        sizes = [(prod(shape), _TYPES[dtype]) for _, shape, dtype, _ in self.model]
        self.entries = sum(numel for numel, _ in sizes)
        self.nbytes = sum(numel * size for numel, size in sizes)

    @property
    def longest(self) -> int:
        """Bytes that a message may have."""
        return _TIMES * self.nbytes + _BESIDE

    @property
    def _most_declared(self) -> int:
        """The most messages that may be declared, and the most payloads of one."""
        return _DECLARED_A_PARAMETER * len(self.names) + _DECLARED_BESIDE

    def check(self, spec: MessageSpec) -> None:
        """Refuse a message about no bucket of the model, before any memory is spent on it.

        Raises:
            PayloadError: the message names the limit that is exceeded.
        """
        if parameter_of(spec.key, self.names) is None:
            raise PayloadError(f"a message about {spec.key!r:.60}, which is no bucket of the worker's model")
        pieces = (*spec.pieces, *spec.pulls, *([] if spec.back is None else [spec.back]))
        if len(pieces) > self._most_declared:
            raise PayloadError(
                f"a message of {len(pieces)} pieces, for a model of {len(self.names)} parameters"
            )
        most = self.entries + _BESIDE
        for piece in pieces:
            if not 0 <= piece.numel <= most:
                raise PayloadError(f"a message of {piece.numel} entries, where the model has {self.entries}")
            spans = piece.spans or ()
            if any(not 0 <= a <= b <= most for a, b in spans):
                raise PayloadError(f"a message about entries that the model of {self.entries} has not")
            if spans and sum(b - a for a, b in spans) != piece.numel:
                raise PayloadError(f"a message of {piece.numel} entries, for spans of another number")
        self.count += 1
        if self.count > self._most_declared:
            raise PayloadError(f"{self.count} kinds of messages, for a model of {len(self.names)} parameters")

    def check_size(self, *buffers: PayloadBuffer) -> None:
        """Refuse a message that needs buffers which are too large.

        Raises:
            PayloadError: the message names the limit that is exceeded.
        """
        for buffer in buffers:
            self.total += buffer.nbytes
            if buffer.nbytes > self.longest:
                raise PayloadError(f"a message of {buffer.nbytes} bytes, for a model of {self.nbytes}")
        if self.total > _ALL_TIMES * (self.nbytes + _BESIDE):
            raise PayloadError(f"messages of {self.total} bytes together, for a model of {self.nbytes}")


def parameter_of(key: str, names: frozenset[str]) -> str | None:
    """The first parameter of a bucket, from its key: numbers or "rest" follow the name; None: unknown."""
    name, slash, part = key.rpartition("/")
    if not slash or not (part == "rest" or (part.isascii() and part.isdigit())):
        return None
    return name if name in names else parameter_of(name, names)


def check_model(model: Sequence[ParameterSpec], optimizers: int) -> None:
    """Refuse a model that this machine cannot hold, or an invalid description.

    Raises:
        AttachError: the message says why.
    """
    names = [name for name, *_ in model]
    if len(set(names)) < len(names):
        raise AttachError("two parameters of the model have one name")
    for name, shape, dtype, optimizer in model:
        if dtype not in _TYPES or any(not 0 <= size < 1 << 48 for size in shape) or len(shape) > 64:
            raise AttachError(
                f"{name!r:.100} of {shape!r:.100} and {dtype!r:.40} is no parameter for a server"
            )
        if optimizer is not None and not 0 <= optimizer < optimizers:
            raise AttachError(f"{name!r:.100} is moved by optimizer {optimizer}, of {optimizers}")
    nbytes, memory = WorkerLimits(model).nbytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise AttachError(
            f"the worker's model has {nbytes / 1e9:.0f} GB for this server, whose machine has "
            f"{memory / 1e9:.0f} GB of memory: start more servers, or a server elsewhere"
        )
