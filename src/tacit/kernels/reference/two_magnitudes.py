"""`kernels.two_magnitudes` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import bucket_rows, code_bytes, pack_codes, unpack_codes
from tacit.kernels.reference.blockwise import LARGEST_BF16
from tacit.kernels.reference.rounding import capped, divide, inverse_of, lane_sums, largest_of
from tacit.kernels.two_magnitudes import BITS

LARGE, NEGATIVE = 1, 2
"""The bits of a code."""


def encode_magnitudes(x: Tensor, bucket: int, codes: Tensor, units: Tensor) -> None:
    """`kernels.two_magnitudes.encode_magnitudes`."""
    for buckets, row in bucket_rows(x, bucket):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        most = largest_of(row)
        y = (row.abs() * inverse_of(most).unsqueeze(1)).float()
        large = y > divide(lane_sums(y, bucket), row.shape[1]).unsqueeze(1)
        many = large.sum(1)
        means = [
            lane_sums(torch.where(side, y, 0.0), bucket) / count.clamp(min=1)
            for side, count in ((~large, row.shape[1] - many), (large, many))
        ]
        scale = capped(torch.stack(means, dim=1) * most.unsqueeze(1)).clamp_(max=LARGEST_BF16)
        units[2 * buckets.start : 2 * buckets.stop] = scale.view(-1).to(torch.bfloat16)
        packed = pack_codes(large.long() * LARGE + (row < 0).long() * NEGATIVE, BITS)
        first = buckets.start * code_bytes(bucket, BITS)
        codes[first : first + packed.numel()] = packed


def add_magnitudes_(
    payloads: Sequence[Sequence[Tensor]], bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """`kernels.two_magnitudes.add_magnitudes_`."""
    if fresh:
        out.zero_()
    for buckets, row in bucket_rows(out, bucket):
        count, size = row.shape
        start = buckets.start * code_bytes(bucket, BITS)
        for codes, units in payloads:
            code = unpack_codes(codes[start : start + count * code_bytes(size, BITS)], BITS, size)
            pair = units[2 * buckets.start : 2 * buckets.stop].view(-1, 2).to(out.dtype) * weight
            value = pair.gather(1, code & LARGE)
            row += torch.where(code & NEGATIVE > 0, -value, value)
