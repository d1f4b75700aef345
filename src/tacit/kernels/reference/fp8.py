"""`kernels.fp8` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    weight: float,
    out: Tensor,
    fresh: bool,
    piece: int = 1 << 14,
) -> None:
    """`kernels.fp8.add_fp8_`, so many entries at a time."""
    if fresh:
        out.zero_()
    wide = torch.promote_types(out.dtype, torch.float32)
    for codes, scale in payloads:
        factor = scale.to(wide) * weight
        for start in range(0, out.numel(), piece):
            stop = min(start + piece, out.numel())
            out[start:stop] += codes[start:stop].view(dtype).to(wide).mul_(factor)
