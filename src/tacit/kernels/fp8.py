"""Entries of 8-bit floating point, each payload with one scale: rounded; decoded and added in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import (
    addresses,
    numba_kernels,
    numba_takes_fp32,
    pieces,
    run_triton,
    triton_takes,
    warm_up,
)
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import fp8 as reference

PIECE = 1 << 14
"""Entries that are widened at a time on the host: they stay in the second-level cache."""
PARTS = {torch.float8_e4m3fn: (3, 7, 126), torch.float8_e5m2: (2, 15, 124)}
"""Bits of the fraction, bias of the exponent, and the largest code of a number, or that of infinity."""


def encode_fp8(x: Tensor, inverse: Tensor, dtype: torch.dtype, codes: Tensor) -> None:
    """Write the flat `x` times `inverse` (one number) to `codes` (uint8), rounded to the nearest even."""
    if x.is_meta:
        warm_up("fp8")
    elif numba_takes_fp32(x):
        numba_kernels("fp8").encode(x.data_ptr(), x.numel(), inverse.item(), *PARTS[dtype], codes.data_ptr())
    else:
        for piece in pieces(x, PIECE):
            reference.encode_fp8(x[piece], inverse, dtype, codes[piece])


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (bytes, scale), decoded, to the flat `out`, in order; `fresh`: to zeros.

    Args:
        dtype: float8_e4m3fn or float8_e5m2, of which the bytes are.
    """
    if out.is_meta:
        return
    for payload in payloads:
        check_fp8(payload, out.numel())
    if numba_takes_fp32(out):
        codes, scales = map(addresses, zip(*payloads, strict=True))
        add = numba_kernels("fp8").add
        add(codes, scales, weight, *PARTS[dtype], fresh, out.data_ptr(), out.numel())
    elif not (triton_takes(out) and run_triton("fp8.add", payloads, dtype, weight, out, fresh)):
        for piece in pieces(out, PIECE):
            parts = [(codes[piece], scale) for codes, scale in payloads]
            reference.add_fp8_(parts, dtype, weight, out[piece], fresh)


def check_fp8(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    expect_parts(payload, numel, ("bytes", numel, torch.uint8), ("scale", 1, torch.float32))
