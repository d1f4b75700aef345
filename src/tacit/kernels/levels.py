"""Stochastic rounding to a few levels, packed: what QSGD and TernGrad send.

A bucket of entries shares one unit; each entry becomes a whole number of units from -top to top, where top =
2^(bits - 1) - 1, rounded up or down at random so that it is right in the mean. Each entry takes 16 random
bits, so the mean is right to 2^-17 of a unit.

Codes (level + top) are packed as `layout` tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import (
    addresses,
    numba_kernels,
    numba_takes_fp32,
    run_triton,
    triton_takes,
    warm_up,
)
from tacit.kernels.layout import bucket_count, code_bytes, codes_per_group
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import levels as reference

BY_LARGEST, BY_NORM = 0.0, -1.0
"""Two values of `clip`: the top level is the bucket's largest magnitude, or its Euclidean norm."""


def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """Write the levels of the flat `x` to `codes` (uint8), and the unit of each bucket to `units` (fp32).

    A bucket whose unit would be below 2^-126 sends zeros; magnitudes count as 3.4e38 at most.

    Args:
        bits: of a code, 2 to 8.
        bucket: entries that share a unit, a power of two from 64 on.
        clip: what the top level stands for: `BY_LARGEST`; `BY_NORM`; or a multiple of the bucket's root mean
            square, but at most the largest magnitude. What lies beyond is clipped.
        seed: 64 bits; other seeds, other random bits.
    """
    if x.is_meta:
        warm_up("levels")
    elif numba_takes_fp32(x):
        at, codes_at, units_at = x.data_ptr(), codes.data_ptr(), units.data_ptr()
        kernels, group = numba_kernels("levels"), codes_per_group(bits)
        kernels.quantize(at, x.numel(), bits, group, bucket, clip, seed, codes_at, units_at)
    elif not (triton_takes(x) and run_triton("levels.quantize", x, bits, bucket, clip, seed, codes, units)):
        reference.quantize(x, bits, bucket, clip, seed, codes, units)


def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_levels(payload, bits, bucket, out.numel())
    if numba_takes_fp32(out):
        codes, units = map(addresses, zip(*payloads, strict=True))
        kernels, group = numba_kernels("levels"), codes_per_group(bits)
        kernels.add(codes, units, bits, group, bucket, weight, fresh, out.data_ptr(), out.numel())
    elif not (triton_takes(out) and run_triton("levels.add", payloads, bits, bucket, weight, out, fresh)):
        reference.add_levels_(payloads, bits, bucket, weight, out, fresh)


def check_levels(payload: Sequence[Tensor], bits: int, bucket: int, numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    levels = ("levels", code_bytes(numel, bits), torch.uint8)
    expect_parts(payload, numel, levels, ("units", bucket_count(numel, bucket), torch.float32))
