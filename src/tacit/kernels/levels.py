"""Stochastic rounding to a few levels, packed: what QSGD and TernGrad send.

A bucket of entries shares one unit; each entry becomes a whole number of units from -top to top, where
top = 2^(bits - 1) - 1, rounded up or down at random so that it is right in the mean. Each draw has 16 random
bits, so the mean is right to 2^-17 of a unit.

Codes (level + top) are packed as `layout` tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.jit import address, addresses, half
from tacit.kernels.layout import buckets, code_bytes, divided, group, lane_sums, rows, strung, unstrung
from tacit.kernels.payloads import expect_parts
from tacit.kernels.philox import halves
from tacit.kernels.pick import by_triton, fits32, fits_triton, path, warming

BY_LARGEST, BY_NORM = 0.0, -1.0
"""Two values of `clip`: the top level is the bucket's largest magnitude, or its Euclidean norm."""
TINY, HUGE = 2.0**-126, 3.4e38
"""The smallest unit whose inverse is finite, and the largest magnitude that scales count with."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.quantize  # noqa: F401


def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """Write the levels of the flat `x` to `codes` (uint8), and the unit of each bucket to `units` (fp32).

    A bucket whose unit would be below 2^-126 sends zeros; magnitudes count as 3.4e38 at most.

    Args:
        bits: of a code, 2 to 8.
        bucket: entries that share a unit, a power of two from 64 on.
        clip: what the top level stands for: `BY_LARGEST`; `BY_NORM`; or a multiple of the bucket's root mean
            square, but at most the largest magnitude. What lies beyond is clipped.
        seed: 64 bits; other seeds, other draws.
    """
    if x.is_meta:
        warm_up(warming())
    elif fits32(x):
        fast = half("quantize")

        here, there, scales = address(x), address(codes), address(units)
        fast.quantize(here, x.numel(), bits, group(bits), bucket, clip, seed, there, scales)
    elif not (fits_triton(x) and by_triton("levels.quantize", x, bits, bucket, clip, seed, codes, units)):
        quantize_torch(x, bits, bucket, clip, seed, codes, units)


def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times what each (codes, units) says to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_levels(payload, bits, bucket, out.numel())
    if fits32(out):
        fast = half("quantize")

        codes, units = (addresses(each) for each in zip(*payloads, strict=True))
        fast.add(codes, units, bits, group(bits), bucket, weight, fresh, address(out), out.numel())
    elif not (fits_triton(out) and by_triton("levels.add", payloads, bits, bucket, weight, out, fresh)):
        add_levels_torch_(payloads, bits, bucket, weight, out, fresh)


def check_levels(payload: Sequence[Tensor], bits: int, bucket: int, numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    levels = ("levels", code_bytes(numel, bits), torch.uint8)
    expect_parts(payload, numel, levels, ("units", buckets(numel, bucket), torch.float32))


# ---- the reference ------------------------------------------------------------------------------------


def quantize_torch(
    x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor
) -> None:
    """The reference: `quantize` in plain torch, equal to the last bit."""
    top = (1 << (bits - 1)) - 1
    for which, row in rows(x, bucket):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        count, size = row.shape
        unit = divided(_scale(row, bucket, clip), top)
        inverse = inverse_of(unit)
        units[which] = torch.where(inverse > 0, unit, 0.0)
        random = halves(seed, which.start * bucket // 8, count, bucket // 8, -(-size // 8), x.device)
        u = random[:, :size].float() * 2.0**-16 + (2.0**-17 + top)  # exact: 24 bits at the most
        level = (row * inverse.unsqueeze(1) + u).clamp_(0, 2 * top)
        packed = strung(level.to(torch.int64), bits)
        start = which.start * bucket // 8 * bits
        codes[start : start + packed.numel()] = packed


def add_levels_torch_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """The reference: `add_levels_` in plain torch, equal to the last bit."""
    top = (1 << (bits - 1)) - 1
    if fresh:
        out.zero_()
    for which, row in rows(out, bucket):
        count, size = row.shape
        start = which.start * bucket // 8 * bits
        for codes, units in payloads:
            packed = codes[start : start + count * code_bytes(size, bits)]
            level = (unstrung(packed, bits, size) - top).to(out.dtype)
            row += level * (units[which].to(out.dtype) * weight).unsqueeze(1)


def inverse_of(unit: Tensor) -> Tensor:
    """1 / unit, or 0 where that would overflow."""
    return torch.where(unit >= TINY, 1 / unit, 0.0)


def largest_of(row: Tensor) -> Tensor:
    """The largest magnitude of each row, at most 3.4e38, in fp32."""
    return row.abs().amax(1).clamp_(max=HUGE).float()


def _scale(row: Tensor, bucket: int, clip: float) -> Tensor:
    most = largest_of(row)
    if clip == BY_LARGEST:
        return most
    y = (row * inverse_of(most).unsqueeze(1)).float()
    total = lane_sums(y * y, bucket)
    if clip < 0:
        return (most * _root(total)).clamp_(max=HUGE)
    return most * (clip * _root(divided(total, row.shape[1]))).clamp_(max=1)


def _root(square: Tensor) -> Tensor:
    return square.double().sqrt().float()
