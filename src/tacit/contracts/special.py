"""Compressors and codecs that can do more than all can, or need more."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts.common import Payload
from tacit.contracts.compressor import Compressor, OneShot
from tacit.contracts.context import Context
from tacit.contracts.transmitted import Transmitted


class MixingCompressor(Compressor):
    """Keeps where this replica stands among the others; for a `MixingTopology`.

    Its state is neither equal on all ranks nor an error that is still to be sent: it belongs together with
    that of the other ranks, which have made the same rounds. A checkpoint keeps it by rank. It begins anew,
    as of `init`, on all ranks at once: where replicas are made equal, and where a checkpoint goes on with
    another number of ranks. All is in units of the distance from the anchor, so that zeros stand for it.
    """

    fixed_graph: ClassVar[bool] = True
    """Whether it adds up what neighbours send, so that all rounds must be in the same graph."""


class AddingCodec(OneShot):
    """A codec whose kernel decodes payloads and adds them up in one pass over memory."""

    additive: ClassVar[bool] = False

    @abstractmethod
    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        """Add `weight` times each payload, checked and decoded, to `out`, in order; `fresh`: to zeros."""

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self.check(payload, out)
        self.add_([payload], 1.0, out, fresh=True)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        self.check(payload, out)
        self.add_([payload], weight, out, fresh=False)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        for payload in payloads[:1] if out.is_meta else payloads:  # a dry run has one for thousands of peers
            self.check(payload, out)
        self.add_(payloads, 1 / len(payloads), out, fresh=True)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """The payload, decoded on demand."""
        return Decoded(self, payload)


class FusedCodec(OneShot):
    """A codec whose kernel also adds the residual, in the same pass over memory."""

    @abstractmethod
    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """The payload of `x`, or of `x + residual`; see `OneShot`.

        `new_residual` is then overwritten by that sum less what is encoded; `x` and `residual` do not change.
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
