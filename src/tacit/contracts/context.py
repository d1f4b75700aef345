"""Where and when an exchange takes place, and how it ends."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from tacit.contracts.collectives import Request
from tacit.contracts.common import Factors, Spans, State
from tacit.contracts.transmitted import Transmitted


class Outcome(NamedTuple):
    """How an exchange ended."""

    mean: Tensor
    """What the peers agreed on, of the shape of the exchanged tensor."""
    sent: Transmitted
    state: State
    """The new state; the session keeps it only if the whole round succeeds."""


Exchange: TypeAlias = Generator[Request, Any, Outcome]


class Workspace(Protocol):
    """Hands out buffers that were allocated before the hot path."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field; swapped with the first when the round is committed."""

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer on the device of `like`, unchanged until the end of the exchange."""


class AxisRank(NamedTuple):
    """A rank's place on an axis."""

    rank: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Context:
    """Where and when an exchange takes place.

    Attributes:
        out: where the mean is to be written; flat, of the exchanged tensor's shape. May be that tensor.
        peers: the number of ranks on the axis where compressors meet; `rank` counts from 0 among them.
        near: this rank's place among the ranks of its node; for topologies by node.
        spans: which stretch each rank of the node takes care of; for topologies by node.
        word: numbers to be averaged over all replicas along the way; for topologies. The first `replicas` of
            them, one a replica, tell of a NaN.
        total: to be added up as `AllReduce` says, over what this rank itself gives, a number for each
        `AllReduce`; see
            `exchanges.watched`. For topologies.
        share: of the model's elements, how much travels in this exchange.
        step: attempts of the optimizer so far; `round`: finished rounds so far.
        lr: the largest learning rate of a group that holds any of the parameters; 0 where no optimizer is
            known.
        alike: whether all ranks of the node give the same tensor; for topologies by node.
        turn: whose turn it is, counted up by one from round to round; for topologies that take turns.
        name: of the bucket that travels; part of every random seed, as `seed` is.
        rescale: what is to become of what is owed of `x`, before it is added, as the learning rate has
            changed. replicas: how many ranks `word` tells of; 0: it tells of nothing else.
        health: where the exchange runs on a device and the host does not wait for it: one number there, the
            largest magnitude of what may overflow on the way. None: the host looks, and overflow is an error
            at once.
    """

    out: Tensor
    work: Workspace
    peers: int
    rank: int = 0
    near: AxisRank = AxisRank()
    spans: Spans = ()
    nonfinite_flags: Tensor | None = None
    finite_probe: Tensor | None = None
    share: float = 1.0
    step: int = 0
    round: int = 0
    lr: float = 0.0
    replicated_in_node: bool = False
    round_index: int = 0
    name: str = ""
    seed: int = 0
    prefix: str = ""
    rescale: Factors = ()
    replicas: int = 0
    health: Tensor | None = None

    @property
    def knows_of_nonfinite(self) -> bool:
        """Whether a rank is known to have given something that is not finite."""
        return self.nonfinite_flags is not None and bool(self.nonfinite_flags[: self.replicas or None].any())

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field `field`, of the shape of `like` (the first)."""
        return self.work.spare(self.prefix + field, like)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A preallocated buffer; what it holds at first is unspecified."""
        return self.work.scratch(self.prefix + key, like, shape, dtype)

    def rng(self, *salt: object) -> torch.Generator:
        """Random numbers equal on all peers; different by rank where the rank is part of the salt."""
        return torch.Generator().manual_seed(zlib.crc32(self._salted(salt)))

    def draw(self, *salt: object) -> int:
        """A seed of 62 bits, for kernels that draw by themselves; equal and different as `rng`."""
        return int.from_bytes(blake2b(self._salted(salt), digest_size=8).digest()) >> 2

    def _salted(self, salt: tuple[object, ...]) -> bytes:
        return "|".join(map(str, (self.seed, self.round, self.name, self.prefix, *salt))).encode()

    def inside(self, part: str, out: Tensor | None = None, of: float = 1.0) -> Context:
        """The context of a part of this exchange, with a share `of` its elements.

        Its state fields and buffers begin with `part.`.
        """
        values = list(_FIELDS(self))  # in the hot path: dataclasses.replace takes twice as long
        values[_OUT] = self.out if out is None else out
        values[_SHARE] *= of
        values[_PREFIX] += f"{part}."
        return Context(*values)


_NAMES = [field.name for field in fields(Context)]
_FIELDS = attrgetter(*_NAMES)
_OUT, _SHARE, _PREFIX = map(_NAMES.index, ("out", "share", "prefix"))
