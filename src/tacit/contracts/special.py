"""Compressors and codecs that can do more than all can, or need more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts.common import Payload, Spans, State
from tacit.contracts.compressor import Compressor, OneShot
from tacit.contracts.context import Context
from tacit.contracts.transmitted import Transmitted


class PartitionedCompressor(Compressor):
    """Several compressors, each for spans of its own."""

    @abstractmethod
    def inside(self) -> Mapping[str, tuple[Compressor, Spans | None]]:
        """Each of them and its spans, by the part of its context; None: all that the others leave."""


class MixingCompressor(Compressor):
    """Keeps where this replica stands among the others; for a `MixingTopology`.

    Its state is neither equal on all ranks nor an error that is still to be sent: it belongs together with
    that of the other ranks, which have made the same rounds. A checkpoint keeps it by rank. It begins anew,
    as of `init`, on all ranks at once: where replicas are made equal, and where a checkpoint goes on with
    another number of ranks. All is in units of the distance from the anchor, so that zeros stand for it.
    """

    fixed_graph: ClassVar[bool] = True
    """Whether it adds up what neighbours send, so that all rounds must be in the same graph."""


class WeighedCompressor(MixingCompressor):
    """A `MixingCompressor` that sends its weight too, so that a rank may get more than it gives."""

    @abstractmethod
    def counted_(self, x: Tensor, state: State) -> None:
        """Overwrite `x`, this replica's tensor, with its contribution where all replicas are made equal.

        They become the mean of the contributions, in place of the mean of the replicas.
        """


class SparseEntries(OneShot):
    """A codec of some entries, whose positions are the last tensor of a payload (see `kernels.positions`)."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the entries arrive as they are: a payload then is (values, positions)."""

    @abstractmethod
    def most(self, numel: int) -> int:
        """How many entries of a tensor of `numel` may be sent, for which there is room."""


class OverflowShown(OneShot):
    """A codec whose payloads have no floating-point parts in which an overflow would show."""

    @abstractmethod
    def may_overflow(self, payload: Payload) -> bool:
        """Whether the payload shows that an entry may be infinite."""


class VariableLength(OneShot):
    """A codec whose payloads may be sent in fewer bytes, if the receiver learns their length."""

    varies: ClassVar[bool] = True

    @abstractmethod
    def longest(self, numel: int) -> int:
        """The most bytes of a message about `numel` entries."""

    @abstractmethod
    def shortened(self, payload: Payload, numel: int) -> Tensor:
        """The message (uint8) of a payload of `numel` entries, which does not change."""

    @abstractmethod
    def restore_(self, message: Tensor, numel: int, payload: Payload) -> None:
        """Overwrite `payload` with that of a message.

        Raises:
            PayloadError: it is none of `numel` entries, or damaged.
        """


class ServerAnswer(OneShot):
    """A codec of a server's answers that are more than the mean of what was pushed."""

    @abstractmethod
    def answer(self, mean: Tensor, memory: State | None, ctx: Context) -> tuple[Payload, State]:
        """The answer, and what the server remembers.

        Args:
            memory: of the last answer about this bucket; None before the first.
        """


@dataclass(frozen=True, slots=True)
class Decoded(Transmitted):
    """The decoded payload was sent; for payloads that no collective overwrites."""

    codec: OneShot
    payload: Payload

    def subtract_from_(self, new_residual: Tensor) -> None:
        """The error of the codec remains."""
        self.codec.decode_add_(self.payload, new_residual, -1.0)

    def dense(self, like: Tensor) -> Tensor:
        """The decoded payload, of the shape of `like`."""
        whole = torch.empty_like(like)
        self.codec.decode_(self.payload, whole)
        return whole
