"""The inputs of an exchange besides its tensor and state: `Context`, and its buffers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tacit.contracts.collectives import Flags
from tacit.contracts.common import Factors, Spans


class Workspace(Protocol):
    """Buffers of an exchange."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field, whose memory `like` is the first; new state is written to it.

        One and the same in all of an exchange.
        """

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A buffer on the device of `like`; reserved until the end of the exchange."""


def seed_of(*salt: object) -> int:
    """A seed of 62 bits for kernels, by all that is to make a difference."""
    return int.from_bytes(blake2b("|".join(map(str, salt)).encode(), digest_size=8).digest()) >> 2


class NoMemory(Workspace):
    """A workspace of meta tensors, for dry runs."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """A meta tensor like the state field."""
        # Of `empty_like` and `zeros_like`, torch loads sympy, a third of a second.
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A meta tensor of that shape and type."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta")


class AxisRank(NamedTuple):
    """A rank on an axis, and the number of ranks there."""

    rank: int = 0
    peers: int = 1


@dataclass(frozen=True, slots=True)
class Context:
    """The inputs of an exchange besides its tensor and state.

    Attributes:
        out: where to write the mean; flat, of the exchanged tensor's shape. May be that tensor.
        peers: the number of ranks on the axis on which compressors exchange; `rank` is this one's, from 0.
        near: this rank among the ranks of its node; for topologies by node.
        spans: the span of the tensor that each rank of the node handles; for topologies by node.
        nonfinite_flags: numbers that the topology averages over all replicas. The first `replicas` of them,
            one a replica, are not 0 where that replica's tensor holds NaN or infinity.
        finite_probe: one element for each `AllReduce`, passed on by topologies; see `AllReduce`.
        share: the share of the model's elements that is sent in this exchange, in (0, 1].
        step: attempts of the optimizer so far; `round`: finished rounds so far.
        begun: attempts before them, with other strategies; errors count these too.
        lr: the largest learning rate of a group that holds any of the parameters; 0 without an optimizer.
        replicated_in_node: whether all ranks of the node have the same tensor; for topologies by node.
        round_index: rises by one from round to round; for topologies that use the ranks of a node in turn.
        name: of the bucket. Part of every random seed, as is `seed`.
        prefix: of the names of state fields and buffers; see `inside`.
        rescale: factors for the residual, before it is added, as the learning rate has changed.
        look: looks for NaN in this replica's tensor, and notes it in `nonfinite_flags`. To be called where
            something shows that there may be one, before the first message leaves. None: it has been done;
            see `Compressor.shows_nonfinite`.
        replicas: the number of flags in `nonfinite_flags`; 0: all of it.
        health: where the exchange runs on a device: one number there, the largest magnitude of what may
            overflow. None: the host checks for overflow and raises at once.
        held: scratch buffers of `work` that are there already, by their whole names.
    """

    out: Tensor
    work: Workspace
    peers: int
    rank: int = 0
    near: AxisRank = AxisRank()
    spans: Spans = ()
    nonfinite_flags: Flags | None = None
    finite_probe: Tensor | None = None
    share: float = 1.0
    step: int = 0
    begun: int = 0
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
    look: Callable[[], None] | None = None
    held: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def knows_of_nonfinite(self) -> bool:
        """Whether `nonfinite_flags` shows a NaN or an infinity of any replica."""
        flags = self.nonfinite_flags
        return flags is not None and bool(flags.numbers[: self.replicas or None].any())

    def spare(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of the state field `field`, of the shape of `like` (the first)."""
        return self.work.spare(self.prefix + field, like)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A preallocated buffer; what it holds at first is unspecified."""
        name = self.prefix + key
        held = self.held.get(name)
        return self.work.scratch(name, like, shape, dtype) if held is None else held

    def rng(self, *salt: object) -> torch.Generator:
        """A generator on the host with the same seed on all peers, unless the rank is part of `salt`.

        The seed also follows from the round (not from the step), the bucket and the session's seed, so what
        is drawn is new in every round, and is drawn again alike where a round is made again.
        """
        return torch.Generator().manual_seed(zlib.crc32(self._salted(salt)))

    def draw(self, *salt: object) -> int:
        """A seed of 62 bits for kernels, equal on all peers unless the rank is part of `salt`."""
        return seed_of(self.seed, self.round, self.name, self.prefix, *salt)

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


_NAMES = [each.name for each in fields(Context)]
_FIELDS = attrgetter(*_NAMES)
_OUT, _SHARE, _PREFIX = map(_NAMES.index, ("out", "share", "prefix"))
