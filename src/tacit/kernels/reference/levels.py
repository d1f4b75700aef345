"""`kernels.levels` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import bucket_rows, code_bytes, pack_codes, unpack_codes
from tacit.kernels.philox import random_uint16
from tacit.kernels.reference.rounding import capped, divide, inverse_of, lane_sums, largest_of


def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """`kernels.levels.quantize`."""
    top = (1 << (bits - 1)) - 1
    for buckets, row in bucket_rows(x, bucket):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        count, size = row.shape
        unit = divide(_scale(row, bucket, clip), top)
        inverse = inverse_of(unit)
        units[buckets] = torch.where(inverse > 0, unit, 0.0)
        first = buckets.start * bucket // 8
        random = random_uint16(seed, first, count, bucket // 8, -(-size // 8), x.device)
        u = random[:, :size].float() * 2.0**-16 + (2.0**-17 + top)  # exact: 24 bits at the most
        level = (row * inverse.unsqueeze(1) + u).clamp_(0, 2 * top)
        packed = pack_codes(level.to(torch.int64), bits)
        codes[first * bits : first * bits + packed.numel()] = packed


def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """`kernels.levels.add_levels_`."""
    top = (1 << (bits - 1)) - 1
    if fresh:
        out.zero_()
    for buckets, row in bucket_rows(out, bucket):
        count, size = row.shape
        start = buckets.start * bucket // 8 * bits
        for codes, units in payloads:
            packed = codes[start : start + count * code_bytes(size, bits)]
            level = (unpack_codes(packed, bits, size) - top).to(out.dtype)
            row += level * (units[buckets].to(out.dtype) * weight).unsqueeze(1)


def _scale(row: Tensor, bucket: int, clip: float) -> Tensor:
    most = largest_of(row)
    if clip == 0:
        return most
    y = (row * inverse_of(most).unsqueeze(1)).float()
    total = lane_sums(y * y, bucket)
    if clip < 0:
        return capped(most * _root(total))
    share = clip * _root(divide(total, row.shape[1]))
    return most * torch.where(share < 1, share, 1.0)  # so with NaN all of it


def _root(square: Tensor) -> Tensor:
    return square.double().sqrt().float()
