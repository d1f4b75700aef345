"""The nearest of 255 levels, one byte an entry, with a unit for each block of 512; in one pass.

The unit is the block's largest magnitude / 127. A block whose unit would be below 2^-126 sends zeros;
magnitudes count as 3.4e38 at most.
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
from tacit.kernels.layout import block_count
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import int8 as reference


def encode_int8(x: Tensor, codes: Tensor, units: Tensor) -> None:
    """Write the levels of the flat `x` to `codes` (uint8, the bytes of int8), and a unit a block (fp32)."""
    if x.is_meta:
        warm_up("int8")
    elif numba_takes_fp32(x):
        numba_kernels("int8").encode(x.data_ptr(), 0, 0, x.numel(), codes.data_ptr(), units.data_ptr())
    elif not (triton_takes(x) and run_triton("int8.encode", x, None, None, codes, units)):
        reference.encode_int8(x, codes, units)


def encode_int8_with_residual(
    x: Tensor, residual: Tensor, new_residual: Tensor, codes: Tensor, units: Tensor
) -> None:
    """Encode x + residual, and write to `new_residual` its difference to what the payload decodes to."""
    if x.is_meta:
        warm_up("int8")
    elif numba_takes_fp32(x, residual, new_residual):
        before, after = residual.data_ptr(), new_residual.data_ptr()
        numba_kernels("int8").encode(
            x.data_ptr(), before, after, x.numel(), codes.data_ptr(), units.data_ptr()
        )
    elif not (
        triton_takes(x, residual, new_residual)
        and run_triton("int8.encode", x, residual, new_residual, codes, units)
    ):
        torch.add(x, residual, out=new_residual)
        reference.encode_int8(new_residual, codes, units)
        reference.add_int8_([(codes, units)], -1.0, new_residual, fresh=False)


def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_int8(payload, out.numel())
    if numba_takes_fp32(out):
        codes, units = map(addresses, zip(*payloads, strict=True))
        numba_kernels("int8").add(codes, units, weight, fresh, out.data_ptr(), out.numel())
    elif not (triton_takes(out) and run_triton("int8.add", payloads, weight, out, fresh)):
        reference.add_int8_(payloads, weight, out, fresh)


def check_int8(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    units = ("units", block_count(numel), torch.float32)
    expect_parts(payload, numel, ("levels", numel, torch.uint8), units)
