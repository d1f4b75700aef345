"""`kernels.blockwise` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import (
    BLOCK,
    block_bytes,
    bucket_rows,
    pack_codes,
    pack_trits,
    unpack_codes,
    unpack_trits,
)
from tacit.kernels.reference.rounding import divide, inverse_of, largest_of

LARGEST_BF16 = 2.0**127 * (2 - 2.0**-7)


def encode_blocks(
    x: Tensor, bits: int, codes: Tensor, units: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.blockwise`."""
    if residual is not None and new_residual is not None:
        encode_blocks(torch.add(x, residual, out=new_residual), bits, codes, units)
        add_blocks_([(codes, units)], bits, -1.0, new_residual, fresh=False)
        return
    top, width = (1 << (bits - 1)) - 1, block_bytes(BLOCK, bits)
    for blocks, row in bucket_rows(x, BLOCK):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        unit = rounded_up(divide(largest_of(row).clamp_(max=LARGEST_BF16), top))
        inverse = inverse_of(unit)
        units[blocks] = torch.where(inverse > 0, unit, 0.0).to(torch.bfloat16)
        level = (row * inverse.unsqueeze(1)).round_().clamp_(-top, top)
        code = level.to(torch.int64) + top
        packed = pack_trits(code) if bits == 2 else pack_codes(code, bits)
        codes[blocks.start * width : blocks.start * width + packed.numel()] = packed


def rounded_up(unit: Tensor) -> Tensor:
    """The least number of bf16 that is not below each (fp32, not negative), in fp32."""
    return ((unit.view(torch.int32) + 0xFFFF) & -65536).view(torch.float32)


def add_blocks_(
    payloads: Sequence[Sequence[Tensor]], bits: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """`kernels.blockwise.add_blocks_`."""
    top, width = (1 << (bits - 1)) - 1, block_bytes(BLOCK, bits)
    if fresh:
        out.zero_()
    for blocks, row in bucket_rows(out, BLOCK):
        count, size = row.shape
        start = blocks.start * width
        for codes, units in payloads:
            packed = codes[start : start + count * block_bytes(size, bits)]
            code = unpack_trits(packed, size) if bits == 2 else unpack_codes(packed, bits, size)
            row += (code - top).to(out.dtype) * (units[blocks].to(out.dtype) * weight).unsqueeze(1)
