"""Entries that reach a threshold, sent as signs (Strom, Interspeech 2015)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.sparse_entries import Entries
from tacit.contracts import Context, Payload
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.payload_layout import block_count
from tacit.kernels.payloads import expect_parts
from tacit.kernels.select import select_above
from tacit.kernels.signs import add_signs_, encode_signs


@dataclass(frozen=True)
class Threshold(Entries):
    """Send +tau or -tau where an entry's magnitude is tau or more, to P - 1 peers.

    Bytes, with room for c = ceil(capacity x n) entries: ceil(c / 8), and those of c positions: the least of
    ceil(n / 8), 4 c, and w c + ceil((c + (n - 1) // 256^w) / 8) for w of 1 or 2. They are sent whether or not
    all are used. Where more entries reach tau, the c largest are sent.

    Differences from the paper: a message has a largest size, so that it is known beforehand; positions and
    signs are packed separately, not in one 32-bit word an entry. Put `ErrorFeedback` around it: what an entry
    has beyond tau goes to the residual, and without it is lost.

    Attributes:
        tau: the threshold, and the magnitude that is sent, in units of the gradient. If it is too small, more
            entries reach it than fit; if it is too large, they are sent seldom.
        capacity: the share of the entries for which there is room, in (0, 1].
    """

    tau: float
    capacity: float = 0.01

    on_device: ClassVar[bool] = True
    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        hint = "write the magnitude that a hundredth of the gradient's entries reach, such as 0.01"
        checks.real("tau", self.tau, hint, above=0)
        ratio.check(self.capacity, "capacity")

    def most(self, numel: int) -> int:
        """ceil(`capacity` x `numel`) entries."""
        return ratio.count(self.capacity, numel)

    def choose(
        self,
        x: Tensor,
        most: int,
        room: EntryBuffer,
        residual: Tensor | None,
        new_residual: Tensor | None,
        look: Callable[[], None] | None,
    ) -> Selection:
        """The entries whose magnitude is `tau` or more."""
        return select_above(x, self.tau, most, room, residual, new_residual)

    def write(self, values: Tensor, most: int, ctx: Context) -> Payload:
        """The packed signs, room for all."""
        return (packed_signs(values, most, ctx),)

    def check_written(self, written: Payload, most: int, out: Tensor) -> None:
        """Expects the signs of as many entries as fit."""
        expect_parts(written, out.numel(), ("signs", sign_bytes(most), torch.uint8))

    def read(self, written: Payload, out: Tensor, weight: float) -> Tensor:
        """Plus or minus `tau` for each entry."""
        signs = written[0][: sign_bytes(out.numel())], out.new_full((1,), self.tau), None
        add_signs_([signs], weight, out, fresh=True)
        return out


def sign_bytes(signs: int) -> int:
    """The bytes of so many packed signs."""
    return -(-signs // 8)


def packed_signs(values: Tensor, most: int, ctx: Context) -> Tensor:
    """The signs of the chosen values, in room for `most`; what is too large to be sent is refused."""
    refuse_overflow(values, ctx)  # the largest entries are among them, and signs hide overflow
    bits = ctx.scratch("signs", values, (sign_bytes(most),), torch.uint8)
    means = ctx.scratch("means", values, (block_count(most),), torch.float32)
    bits.zero_()
    count = values.numel()
    encode_signs(values, bits[: sign_bytes(count)], means[: block_count(count)], None)
    return bits
