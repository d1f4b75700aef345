"""Low-rank matrices whose factors travel in a few bits (after DiLoCoX: Qi et al. 2025, arXiv 2506.21263)."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tacit.compressors.powersgd import PowerSGD
from tacit.compressors.qsgd import QSGD
from tacit.contracts import Context, ReduceEncoded, Request


@dataclass(frozen=True)
class QuantizedPowerSGD(PowerSGD):
    """`PowerSGD` whose P and Q travel in QSGD's levels, each rounded at random and sent to P - 1 peers.

    Bytes: those of `QSGD(bits)` for all P of a bucket, r (m + ...) numbers, and for all Q. What rounding Q
    leaves out is left out of what a rank has contributed, P P' M: under `ErrorFeedback` it is sent later.
    Rounding P only turns the basis, which is orthogonalised afterwards.

    Attributes:
        bits: of a level, 2 to 8.
    """

    bits: int = 4

    hides_nonfinite: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        QSGD(self.bits)

    def _average_(
        self, factor: Tensor, seen: Tensor | None, which: str, ctx: Context
    ) -> Generator[Request, Any, None]:
        given = ctx.scratch(f"{which} given", factor, factor.shape, factor.dtype).copy_(factor)
        _, sent = yield ReduceEncoded(QSGD(self.bits), given, ctx.inside(which, out=factor))
        if seen is not None:
            sent.subtract_from_(seen.zero_())
            seen.neg_()
