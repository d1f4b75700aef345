"""`kernels.fp8` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def encode_fp8(x: Tensor, inverse: Tensor, dtype: torch.dtype, codes: Tensor) -> None:
    """`kernels.fp8.encode_fp8`."""
    codes.copy_((x * inverse).to(dtype).view(torch.uint8))


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """`kernels.fp8.add_fp8_`."""
    if fresh:
        out.zero_()
    wide = torch.promote_types(out.dtype, torch.float32)
    for codes, scale in payloads:
        out += codes.view(dtype).to(wide).mul_(scale.to(wide) * weight)
