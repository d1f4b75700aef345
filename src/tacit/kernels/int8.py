"""The nearest of 255 levels, one byte an entry, with a unit for each block of 512; in one pass.

The unit is the block's largest magnitude / 127. A block whose unit would be below 2^-126 sends zeros;
magnitudes count as 3.4e38 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.jit import address, addresses, half
from tacit.kernels.layout import buckets, divided, rows
from tacit.kernels.levels import inverse_of, largest_of
from tacit.kernels.payloads import expect_parts
from tacit.kernels.pick import by_triton, fits32, fits_triton, path, warming

BLOCK = 512
"""Entries that share a unit."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.rounding  # noqa: F401


def encode_int8(x: Tensor, codes: Tensor, units: Tensor) -> None:
    """Write the levels of the flat `x` to `codes` (uint8, the bytes of int8), and a unit a block (fp32)."""
    if x.is_meta:
        warm_up(warming())
    elif fits32(x):
        _compiled(x, 0, 0, codes, units)
    elif not (fits_triton(x) and by_triton("int8.encode", x, None, None, codes, units)):
        encode_int8_torch(x, codes, units)


def encode_int8_owed(x: Tensor, residual: Tensor, new_residual: Tensor, codes: Tensor, units: Tensor) -> None:
    """Encode x + residual, and write to `owed` what of it is not said."""
    if x.is_meta:
        warm_up(warming())
    elif fits32(x, residual, new_residual):
        _compiled(x, address(residual), address(new_residual), codes, units)
    elif not (
        fits_triton(x, residual, new_residual)
        and by_triton("int8.encode", x, residual, new_residual, codes, units)
    ):
        torch.add(x, residual, out=new_residual)
        encode_int8_torch(new_residual, codes, units)
        add_int8_torch_([(codes, units)], -1.0, new_residual, fresh=False)


def _compiled(x: Tensor, residual: int, new_residual: int, codes: Tensor, units: Tensor) -> None:

    half("rounding").encode(address(x), residual, new_residual, x.numel(), address(codes), address(units))


def add_int8_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times what each (codes, units) says to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_int8(payload, out.numel())
    if fits32(out):
        codes, units = zip(*payloads, strict=True)
        half("rounding").add(addresses(codes), addresses(units), weight, fresh, address(out), out.numel())
    elif not (fits_triton(out) and by_triton("int8.add", payloads, weight, out, fresh)):
        add_int8_torch_(payloads, weight, out, fresh)


def check_int8(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    units = ("units", buckets(numel, BLOCK), torch.float32)
    expect_parts(payload, numel, ("levels", numel, torch.uint8), units)


# ---- the reference ------------------------------------------------------------------------------------


def encode_int8_torch(x: Tensor, codes: Tensor, units: Tensor) -> None:
    """The reference: `encode_int8` in plain torch, equal to the last bit."""
    for which, row in rows(x, BLOCK):
        row = row.to(torch.promote_types(row.dtype, torch.float32))
        unit = divided(largest_of(row), 127)
        inverse = inverse_of(unit)
        units[which] = torch.where(inverse > 0, unit, 0.0)
        level = (row * inverse.unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
        start = which.start * BLOCK
        codes[start : start + level.numel()] = level.view(-1).view(torch.uint8)


def add_int8_torch_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """The reference: `add_int8_` in plain torch, equal to the last bit."""
    if fresh:
        out.zero_()
    for which, row in rows(out, BLOCK):
        start = which.start * BLOCK
        for codes, units in payloads:
            level = codes[start : start + row.numel()].view(torch.int8).view_as(row).to(out.dtype)
            row += level * (units[which].to(out.dtype) * weight).unsqueeze(1)
