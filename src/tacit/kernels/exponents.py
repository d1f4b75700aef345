"""Sign and exponent, rounded to a power of two at random: what natural compression sends.

As a bit pattern, a number lies between two powers of two as it does as a number: adding random bits below the
exponent carries into it with just the probability that makes the result right in the mean (to 2^-17).
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
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import exponents as reference


def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """Write a biased exponent (uint8) and a sign bit (1: not negative) for each entry of the flat `x`.

    The exponent is that of fp32: 0 stands for zero; 2^127 is the largest, and what lies above counts as that.

    Args:
        seed: 64 bits; other seeds, other random bits.
        exponents: uint8, as many as `x` has entries; is overwritten.
        bits: uint8, ceil(numel / 8); is overwritten.
    """
    if x.is_meta:
        warm_up("exponents")
    elif numba_takes_fp32(x):
        array = x.detach().numpy()
        kernels = numba_kernels("exponents")
        kernels.encode(array, array.view("i4"), seed, exponents.numpy(), bits.numpy())
    elif not (triton_takes(x) and run_triton("exponents.encode", x, seed, exponents, bits)):
        reference.encode_exponents(x, seed, exponents, bits)


def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each (exponents, bits), decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_exponents(payload, out.numel())
    if numba_takes_fp32(out):
        exponents, bits = map(addresses, zip(*payloads, strict=True))
        numba_kernels("exponents").add(exponents, bits, weight, fresh, out.detach().numpy())
    elif not (triton_takes(out) and run_triton("exponents.add", payloads, weight, out, fresh)):
        reference.add_exponents_(payloads, weight, out, fresh)


def check_exponents(payload: Sequence[Tensor], numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    signs = ("signs", -(-numel // 8), torch.uint8)
    expect_parts(payload, numel, ("exponents", numel, torch.uint8), signs)
