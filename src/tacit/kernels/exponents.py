"""Sign and exponent, rounded to a power of two at random: what natural compression sends.

As a bit pattern, a number lies between two powers of two as it does as a number: adding random bits below the
exponent carries into it with just the probability that makes the result right in the mean (to 2^-17).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.jit import addresses, half
from tacit.kernels.layout import rows, strung, unstrung
from tacit.kernels.payloads import expect_parts
from tacit.kernels.philox import halves
from tacit.kernels.pick import by_triton, fits32, fits_triton, path, warming

BLOCK = 512
"""Entries whose signs are packed together; see `layout`."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.carry  # noqa: F401


def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """Write a biased exponent (uint8) and a sign bit (1: not negative) for each entry of the flat `x`.

    The exponent is that of fp32: 0 stands for zero; 2^127 is the largest, and what lies above counts as that.
    """
    if x.is_meta:
        warm_up(warming())
    elif fits32(x):
        array = x.detach().numpy()
        half("carry").encode(array, array.view("i4"), seed, exponents.numpy(), bits.numpy())
    elif not (fits_triton(x) and by_triton("exponents.encode", x, seed, exponents, bits)):
        encode_exponents_torch(x, seed, exponents, bits)


def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times what each (exponents, bits) says to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_exponents(payload, out.numel())
    if fits32(out):
        exponents, bits = zip(*payloads, strict=True)
        half("carry").add(addresses(exponents), addresses(bits), weight, fresh, out.detach().numpy())
    elif not (fits_triton(out) and by_triton("exponents.add", payloads, weight, out, fresh)):
        add_exponents_torch_(payloads, weight, out, fresh)


def check_exponents(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    signs = ("signs", -(-numel // 8), torch.uint8)
    expect_parts(payload, numel, ("exponents", numel, torch.uint8), signs)


# ---- the reference ------------------------------------------------------------------------------------


def encode_exponents_torch(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """The reference: `encode_exponents` in plain torch, equal to the last bit."""
    for which, row in rows(x, BLOCK):
        count, size = row.shape
        start = which.start * BLOCK
        random = halves(seed, start // 8, count, BLOCK // 8, -(-size // 8), x.device)[:, :size]
        pattern = row.float().view(torch.int32).to(torch.int64) & 0x7FFFFFFF
        exponent = ((pattern + (random << 7) + 64) >> 23).clamp_(max=254)
        exponents[start : start + exponent.numel()] = exponent.view(-1).to(torch.uint8)
        packed = strung((row >= 0).to(torch.int64), 1)
        bits[start // 8 : start // 8 + packed.numel()] = packed


def add_exponents_torch_(
    payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool
) -> None:
    """The reference: `add_exponents_` in plain torch, equal to the last bit."""
    if fresh:
        out.zero_()
    for which, row in rows(out, BLOCK):
        start, size = which.start * BLOCK, row.shape[1]
        for exponents, bits in payloads:
            power = exponents[start : start + row.numel()].to(torch.int32) << 23
            value = power.view(torch.float32).view_as(row).to(out.dtype)
            packed = bits[start // 8 : start // 8 + len(row) * -(-size // 8)]
            row += weight * torch.where(unstrung(packed, 1, size).bool(), value, -value)
