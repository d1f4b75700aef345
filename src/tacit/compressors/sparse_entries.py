"""The base of sparse compressors: choosing entries, and packing their positions and values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import Context, Decoded, FusedCodec, Payload, Transmitted
from tacit.kernels.entry_buffers import EntryBuffer, Selection, buffer_size
from tacit.kernels.payload_layout import position_bytes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.positions import (
    clear_,
    pack_positions,
    scatter_add_,
    scatter_all_,
    unpack_all,
)
from tacit.kernels.thread_scratch import thread_scratch

AT_ONCE = 8
"""The number of payloads that are decoded together, which determines the scratch memory."""


@dataclass(frozen=True)
class Entries(FusedCodec):
    """Send some entries: what `write` makes of their values, and last in the payload their positions.

    Positions take 4, or about 2.1, 1.1 or n / 8k bytes each, by n and k, as in `kernels.payload_layout`.
    """

    sliceable: ClassVar[bool] = True
    sent_lasts: ClassVar[bool] = True

    @abstractmethod
    def most(self, numel: int) -> int:
        """The most entries of a tensor of `numel` that may be sent."""

    @abstractmethod
    def choose(
        self,
        x: Tensor,
        most: int,
        room: EntryBuffer,
        residual: Tensor | None,
        new_residual: Tensor | None,
        look: Callable[[], None] | None,
    ) -> Selection:
        """Choose entries of `x` + `residual`; `new_residual` gets the others. `look`: `Context.look`."""

    @abstractmethod
    def write(self, values: Tensor, most: int, ctx: Context) -> Payload:
        """The tensors that are sent for the chosen values; `most` is the room for entries."""

    @abstractmethod
    def read(self, written: Payload, out: Tensor, weight: float) -> Tensor:
        """Fill `out` with `weight` times the decoded values, and return it."""

    def encode(
        self, x: Tensor, ctx: Context, residual: Tensor | None = None, new_residual: Tensor | None = None
    ) -> Payload:
        """(the tensors of `write`, ..., positions).

        With a residual, the rounding error of the chosen entries is in the new one too.
        """
        numel = x.numel()
        most = self.most(numel)
        places = (buffer_size(numel, most),)
        taken = thread_scratch("index", *places, torch.int32, x.device)  # as positions are unpacked to, later
        found = EntryBuffer(taken, ctx.scratch("entries", x, places, x.dtype))
        index, values = self.choose(x, most, found, residual, new_residual, ctx.look)
        packed = ctx.scratch("positions", x, (position_bytes(numel, most),), torch.uint8)
        pack_positions(index, numel, most, packed)
        written = self.write(values, most, ctx)
        if new_residual is not None and not self.exact:
            scratch = thread_scratch("said", values.numel(), values.dtype, values.device)
            said = self.read(written, scratch, 1.0)
            scatter_add_(index, torch.sub(values, said, out=said), new_residual)
        return (*written, packed)

    @property
    def exact(self) -> bool:
        """Whether the chosen entries are sent without rounding: a payload then is (values, positions)."""
        return False

    def exact_entries(self, numel: int) -> int | None:
        return self.most(numel) if self.exact else None

    def check(self, payload: Payload, out: Tensor) -> None:
        """Check the bytes of the positions, and the values of the entries."""
        numel = out.numel()
        most = self.most(numel)
        positions = ("positions", position_bytes(numel, most), torch.uint8)
        if self.exact:
            expect_parts(payload, numel, ("entries", most, out.dtype), positions)
        else:
            expect_parts(payload[-1:], numel, positions)
            self.check_written(payload[:-1], most, out)

    def check_written(self, written: Payload, most: int, out: Tensor) -> None:
        """Check the tensors of `write`, where entries are not exact; see `check`."""

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """The decoded entries, among zeros."""
        self.check(payload, out)
        self._decode_all([payload], out, 1.0, fresh=True)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Scatter-add of the sent entries only."""
        self.check(payload, out)
        self._decode_all([payload], out, weight, fresh=False)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """The entries of all peers, added in rank order; on the CPU in one pass over memory."""
        for payload in payloads:
            self.check(payload, out)
        for first in range(0, len(payloads), AT_ONCE):
            some = payloads[first : first + AT_ONCE]
            self._decode_all(some, out, 1 / len(payloads), fresh=not first)

    def _decode_all(self, payloads: Sequence[Payload], out: Tensor, weight: float, fresh: bool) -> None:
        places = self._places(payloads, out.numel())
        if self.exact:
            found, factor = [*map(Selection, places, map(itemgetter(0), payloads))], weight
        else:
            found, factor = [], 1.0
            for i, (payload, index) in enumerate(zip(payloads, places, strict=True)):
                values = thread_scratch(f"values{i}", index.numel(), out.dtype, out.device)
                found.append(Selection(index, self.read(tuple(payload[:-1]), values, weight)))
        scatter_all_(found, out, factor, fresh)

    def _places(self, payloads: Sequence[Payload], numel: int) -> Sequence[Tensor]:
        """The positions of each payload's entries, in scratch memory."""
        return unpack_all([*map(itemgetter(-1), payloads)], numel, self.most(numel))

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """The chosen entries as peers decode them."""
        return _SomeSent(self, payload)


@dataclass(frozen=True, slots=True)
class _SomeSent(Decoded):
    def clear_(self, x: Tensor) -> None:
        assert isinstance(self.codec, Entries)
        (index,) = self.codec._places([self.payload], x.numel())
        clear_(index, x)
