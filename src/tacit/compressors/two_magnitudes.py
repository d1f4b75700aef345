"""A sign and one of two magnitudes an entry, for values that are alike but for their signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.compressors.levels import check_bucket
from tacit.contracts import AddingCodec, Context, Payload
from tacit.kernels.payload_layout import bucket_count, code_bytes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.two_magnitudes import BITS, add_magnitudes_, encode_magnitudes


@dataclass(frozen=True)
class TwoMagnitudes(AddingCodec):
    """Send the sign of each entry, and whether its magnitude is above its bucket's mean, to P - 1 peers.

    An entry arrives as the mean of the bucket's magnitudes on its side of the mean; both are sent in bf16.
    Bytes: ceil(n / 4) + 4 x ceil(n / bucket). For this division no two magnitudes are nearer to the entries,
    so under error feedback the residual is always smaller than what was encoded. With 2-bit levels in equal
    steps it may be larger, where one entry is far above the others. It is biased: put `ErrorFeedback` around
    it. After the 2-bit values of SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706), whose code divides a
    tensor's values by their spread into four bins, and sends each bin's mean.

    Attributes:
        bucket: entries that share two magnitudes, a power of two.
    """

    bucket: int = 512

    sliceable: ClassVar[bool] = True
    shows_nonfinite: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bucket(self.bucket)

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed signs and sides, two magnitudes for each bucket)."""
        codes = ctx.scratch("codes", x, (code_bytes(x.numel(), BITS),), torch.uint8)
        units = ctx.scratch("units", x, (2 * bucket_count(x.numel(), self.bucket),), torch.bfloat16)
        encode_magnitudes(x, self.bucket, codes, units)
        return codes, units

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        codes = ("signs", code_bytes(numel, BITS), torch.uint8)
        magnitudes = ("magnitudes", 2 * bucket_count(numel, self.bucket), torch.bfloat16)
        expect_parts(payload, numel, codes, magnitudes)

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_magnitudes_(payloads, self.bucket, weight, out, fresh)
