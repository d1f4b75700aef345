"""The entries that would reach the largest of their bin (AdaComp: Chen et al., AAAI 2018)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.sparse_entries import Entries
from tacit.compressors.threshold import packed_signs, sign_bytes
from tacit.contracts import Context, Payload
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.payloads import expect_parts
from tacit.kernels.signs import add_signs_


@dataclass(frozen=True)
class AdaComp(Entries):
    """Of each `bin` entries in a row send those that one more gradient like this one would make the largest.

    With e the residual and g the gradient (arXiv 1712.02679): G = e + g; H = G + g; an entry is sent where
    |H_i| is at least the largest |G| of its bin. So how many are sent adapts to each bin and step. They
    travel as signs of the mean magnitude of what is sent. Put `ErrorFeedback` around it.

    Bytes, with room for c = ceil(capacity x n) entries: ceil(c / 8), 4, and those of c positions, as
    `Threshold`. They are sent whether or not all are used; where more are to be sent, the c largest are.

    Differences from the paper: a message has a largest size, so that it is known beforehand; bins are parts
    of a bucket, all of one length; the magnitude is the mean of what is sent, not of the bins' largest.

    Attributes:
        bin: the paper's L_T: 50 for convolutions, 500 for other layers.
        capacity: the share of the entries for which there is room, in (0, 1].
    """

    bin: int = 500
    capacity: float = 0.02

    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        checks.whole("bin", self.bin, 1, None, "write 500, or 50 for convolutions")
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
        """Those that reach the largest of their bin."""
        if x.is_meta:
            return Selection(room.positions[:most], room.values[:most])
        total = x.clone() if residual is None else x + residual
        ahead = (total.double() + x.double()).abs()
        bins = torch.nn.functional.pad(total.abs(), (0, -x.numel() % self.bin)).view(-1, self.bin)
        reach = bins.amax(dim=1).repeat_interleave(self.bin)[: x.numel()]
        index = ((ahead >= reach) & (total != 0)).nonzero().view(-1)
        if len(index) > most:
            index = index[total[index].abs().topk(most).indices].sort().values
        values = total[index]
        if new_residual is not None:
            new_residual.copy_(total).index_fill_(0, index, 0.0)
        return Selection(index.int(), values)

    def write(self, values: Tensor, most: int, ctx: Context) -> Payload:
        """The packed signs, room for all, and the magnitude."""
        bits = packed_signs(values, most, ctx)
        size = ctx.scratch("size", values, (1,), torch.float32)
        if not values.is_meta:
            size.fill_(min(float(values.abs().double().mean()), 3.4e38) if values.numel() else 0.0)
        return bits, size

    def check_written(self, written: Payload, most: int, out: Tensor) -> None:
        """Expects the signs of as many entries as fit, and their magnitude."""
        signs = "signs", sign_bytes(most), torch.uint8
        expect_parts(written, out.numel(), signs, ("size", 1, torch.float32))

    def read(self, written: Payload, out: Tensor, weight: float) -> Tensor:
        """Plus or minus the magnitude for each entry."""
        bits, size = written
        add_signs_([(bits[: sign_bytes(out.numel())], size, None)], weight, out, fresh=True)
        return out
