"""Entries of 8-bit floating point, each payload with one scale: decoded and added, on a GPU in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import pieces, run_triton, triton_takes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import fp8 as reference

PIECE = 1 << 14
"""Entries that are widened at a time on the host: they stay in the second-level cache."""


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
    if not (triton_takes(out) and run_triton("fp8.add", payloads, dtype, weight, out, fresh)):
        for piece in pieces(out, PIECE):
            parts = [(codes[piece], scale) for codes, scale in payloads]
            reference.add_fp8_(parts, dtype, weight, out[piece], fresh)


def check_fp8(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    expect_parts(payload, numel, ("bytes", numel, torch.uint8), ("scale", 1, torch.float32))
