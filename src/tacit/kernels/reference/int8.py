"""`kernels.int8` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import BLOCK, bucket_rows
from tacit.kernels.reference.rounding import divide, inverse_of, largest_of


def encode_int8(
    x: Tensor,
    codes: Tensor,
    units: Tensor,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:
    """See `kernels.int8`."""
    if residual is not None and new_residual is not None:
        encode_int8(torch.add(x, residual, out=new_residual), codes, units)
        add_int8_([(codes, units)], -1.0, new_residual, fresh=False)
        return
    for blocks, row in bucket_rows(x, BLOCK):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        unit = divide(largest_of(row), 127)
        inverse = inverse_of(unit)
        units[blocks] = torch.where(inverse > 0, unit, 0.0)
        level = (row * inverse.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
        start = blocks.start * BLOCK
        codes[start : start + level.numel()] = level.view(-1).view(torch.uint8)


def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """`kernels.int8.add_int8_`."""
    if fresh:
        out.zero_()
    for blocks, row in bucket_rows(out, BLOCK):
        start = blocks.start * BLOCK
        for codes, units in payloads:
            level = codes[start : start + row.numel()].view(torch.int8).view_as(row).to(out.dtype)
            row += level * (units[blocks].to(out.dtype) * weight).unsqueeze(1)
