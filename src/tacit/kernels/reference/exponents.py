"""`kernels.exponents` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import BLOCK, bucket_rows, pack_codes, unpack_codes
from tacit.kernels.philox import random_uint16


def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """`kernels.exponents.encode_exponents`."""
    for blocks, row in bucket_rows(x, BLOCK):
        count, size = row.shape
        start = blocks.start * BLOCK
        random = random_uint16(seed, start // 8, count, BLOCK // 8, -(-size // 8), x.device)[:, :size]
        pattern = row.float().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        exponent = ((pattern + (random << 7) + 64) >> 23).clamp_(max=254)
        exponents[start : start + exponent.numel()] = exponent.view(-1).to(torch.uint8)
        packed = pack_codes((row >= 0).to(torch.int64), 1)
        bits[start // 8 : start // 8 + packed.numel()] = packed


def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """`kernels.exponents.add_exponents_`."""
    if fresh:
        out.zero_()
    for blocks, row in bucket_rows(out, BLOCK):
        start, size = blocks.start * BLOCK, row.shape[1]
        for exponents, bits in payloads:
            power = exponents[start : start + row.numel()].to(torch.int32) << 23
            value = power.view(torch.float32).view_as(row).to(out.dtype)
            packed = bits[start // 8 : start // 8 + len(row) * -(-size // 8)]
            row += weight * torch.where(unpack_codes(packed, 1, size).bool(), value, -value)
