"""Entries of 8-bit floating point, each payload with one scale: rounded; decoded and added in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import kernel


@kernel("x", triton=())
def encode_fp8(x: Tensor, inverse: Tensor, dtype: torch.dtype, codes: Tensor) -> None:
    """Write the flat `x` times `inverse` (one number) to `codes` (uint8), rounded to the nearest even."""


@kernel("out")
def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (bytes, scale), decoded, to the flat `out`, in order; `fresh`: to zeros.

    Args:
        dtype: float8_e4m3fn or float8_e5m2, of which the bytes are.
    """
