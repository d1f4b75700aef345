"""`kernels.fp8` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import pieces

PIECE = 1 << 14
"""Entries that are widened at a time on the host: they stay in the second-level cache."""
LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def encode_fp8(x: Tensor, inverse: Tensor, dtype: torch.dtype, codes: Tensor) -> None:
    """See `kernels.fp8`."""
    for piece in pieces(x, PIECE):
        numbers = x[piece] * inverse
        if dtype == torch.float8_e4m3fn:  # which has no infinity: torch 2.9 makes NaN of larger ones
            numbers.clamp_(-LARGEST_E4M3, LARGEST_E4M3)
        codes[piece].copy_(numbers.to(dtype).view(torch.uint8))


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.fp8`."""
    if fresh:
        out.zero_()
    wide = torch.promote_types(out.dtype, torch.float32)
    for piece in pieces(out, PIECE):
        for codes, scale in payloads:
            out[piece] += codes[piece].view(dtype).to(wide).mul_(scale.to(wide) * weight)
