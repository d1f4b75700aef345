"""The nearest of a few levels, packed, with a unit for each block of 512; in one pass.

An entry becomes the nearest whole number of units from -top to top, top = 2^(bits - 1) - 1; halfway, the even
one. The unit is the block's largest magnitude / top in bf16, rounded up, so that none lies beyond the top.
(fp16 would lack the range of fp32.) A block whose unit would be below 2^-126 sends zeros; magnitudes count as
the largest number of bf16 at most.

Codes (level + top) are packed as `layout` tells: of 2 bits, whose levels are three, five a byte.
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
from tacit.kernels.layout import block_count, blocks_bytes, codes_per_group
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import blockwise as reference


def encode_blocks(x: Tensor, bits: int, codes: Tensor, units: Tensor) -> None:
    """Write the packed levels of the flat `x` to `codes` (uint8), and a unit a block to `units` (bf16).

    `bits`: of a level, 2 to 8.
    """
    if x.is_meta:
        warm_up("blockwise")
    elif numba_takes_fp32(x):
        numba_kernels("blockwise").encode(
            x.data_ptr(), 0, 0, x.numel(), bits, codes_per_group(bits), codes.data_ptr(), units.data_ptr()
        )
    elif not (triton_takes(x) and run_triton("blockwise.encode", x, None, None, bits, codes, units)):
        reference.encode_blocks(x, bits, codes, units)


def encode_blocks_with_residual(
    x: Tensor, residual: Tensor, new_residual: Tensor, bits: int, codes: Tensor, units: Tensor
) -> None:
    """Encode x + residual, and write to `new_residual` its difference to what the payload decodes to."""
    if x.is_meta:
        warm_up("blockwise")
    elif numba_takes_fp32(x, residual, new_residual):
        before, after = residual.data_ptr(), new_residual.data_ptr()
        numba_kernels("blockwise").encode(
            x.data_ptr(),
            before,
            after,
            x.numel(),
            bits,
            codes_per_group(bits),
            codes.data_ptr(),
            units.data_ptr(),
        )
    elif not (
        triton_takes(x, residual, new_residual)
        and run_triton("blockwise.encode", x, residual, new_residual, bits, codes, units)
    ):
        torch.add(x, residual, out=new_residual)
        reference.encode_blocks(new_residual, bits, codes, units)
        reference.add_blocks_([(codes, units)], bits, -1.0, new_residual, fresh=False)


def add_blocks_(
    payloads: Sequence[Sequence[Tensor]], bits: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_blocks(payload, bits, out.numel())
    if numba_takes_fp32(out):
        codes, units = map(addresses, zip(*payloads, strict=True))
        group = codes_per_group(bits)
        numba_kernels("blockwise").add(codes, units, bits, group, weight, fresh, out.data_ptr(), out.numel())
    elif not (triton_takes(out) and run_triton("blockwise.add", payloads, bits, weight, out, fresh)):
        reference.add_blocks_(payloads, bits, weight, out, fresh)


def check_blocks(payload: Sequence[Tensor], bits: int, numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    levels = ("levels", blocks_bytes(numel, bits), torch.uint8)
    expect_parts(payload, numel, levels, ("units", block_count(numel), torch.bfloat16))
