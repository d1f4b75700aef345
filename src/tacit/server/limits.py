"""How much a worker may have a server keep: what its model needs, and not more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from tacit.errors import AttachError, PayloadError
from tacit.transports.messages import Declared, Parameter
from tacit.transports.pairs import Parcel

_TYPES = {
    str(dtype).removeprefix("torch."): dtype.itemsize
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
}
_BESIDE = 1 << 20
"""Entries, or bytes, that stand in a message beside those of parameters: words, marks, scales."""
_TIMES = 4
"""How many times as long as all of the model one message may be."""
_ALL_TIMES = 64
"""And all kinds of messages of one worker together: both ways, for each phase, part and stage."""
_KINDS_A_PARAMETER, _KINDS_BESIDE = 64, 1024


@dataclass
class Limits:
    """Of one worker, whose `model` has so many bytes.

    Attributes:
        names: of the parameters; those of buckets begin with one.
        nbytes, entries: of all of them.
        kinds: how many kinds of messages were declared; `told`, of how many bytes together.
    """

    model: Sequence[Parameter]
    names: frozenset[str] = field(init=False)
    nbytes: int = field(init=False)
    entries: int = field(init=False)
    kinds: int = 0
    told: int = 0

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
    def _most_kinds(self) -> int:
        """Of messages, and of pieces in one of them."""
        return _KINDS_A_PARAMETER * len(self.names) + _KINDS_BESIDE

    def check(self, told: Declared) -> None:
        """Refuse what is of no bucket of the model, before any memory is spent on it.

        Raises:
            PayloadError: says what is too much.
        """
        bucket = lot_of(told.key, self.names)
        if bucket is None:
            raise PayloadError(f"a message about {told.key!r:.60}, which is no bucket of the worker's model")
        pieces = (*told.pieces, *told.pulls, *([] if told.back is None else [told.back]))
        if len(pieces) > self._most_kinds:
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
        self.kinds += 1
        if self.kinds > self._most_kinds:
            raise PayloadError(f"{self.kinds} kinds of messages, for a model of {len(self.names)} parameters")

    def check_size(self, *parcels: Parcel) -> None:
        """Refuse what would be read into buffers that are too large.

        Raises:
            PayloadError: says what is too much.
        """
        for parcel in parcels:
            self.told += parcel.nbytes
            if parcel.nbytes > self.longest:
                raise PayloadError(f"a message of {parcel.nbytes} bytes, for a model of {self.nbytes}")
        if self.told > _ALL_TIMES * (self.nbytes + _BESIDE):
            raise PayloadError(f"messages of {self.told} bytes together, for a model of {self.nbytes}")


def lot_of(key: str, names: frozenset[str]) -> str | None:
    """The parameter whose bucket a key is of: behind its name stand numbers, or "rest"."""
    name, slash, part = key.rpartition("/")
    if not slash or not (part == "rest" or (part.isascii() and part.isdigit())):
        return None
    return name if name in names else lot_of(name, names)


def check_model(model: Sequence[Parameter], rules: int) -> None:
    """Refuse a model that this machine cannot hold, or that is none.

    Raises:
        AttachError: says why.
    """
    names = [name for name, *_ in model]
    if len(set(names)) < len(names):
        raise AttachError("two parameters of the model have one name")
    for name, shape, dtype, rule in model:
        if dtype not in _TYPES or any(not 0 <= size < 1 << 48 for size in shape) or len(shape) > 64:
            raise AttachError(
                f"{name!r:.100} of {shape!r:.100} and {dtype!r:.40} is no parameter for a server"
            )
        if rule is not None and not 0 <= rule < rules:
            raise AttachError(f"{name!r:.100} is moved by rule {rule}, of {rules}")
    nbytes, memory = Limits(model).nbytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise AttachError(
            f"the worker's model has {nbytes / 1e9:.0f} GB for this server, whose machine has "
            f"{memory / 1e9:.0f} GB of memory: start more servers, or a server elsewhere"
        )
