"""Sign and exponent, rounded to a power of two at random: what natural compression sends.

As a bit pattern, a number lies between two powers of two as it does as a number: adding random bits below the
exponent carries into it with just the probability that makes the result right in the mean (to 2^-17).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tacit.kernels.dispatch import kernel


@kernel("x")
def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """Write a biased exponent (uint8) and a sign bit (1: not negative) for each entry of the flat `x`.

    The exponent is that of fp32: 0 stands for zero; 2^127 is the largest, and what lies above counts as that.

    Args:
        seed: 64 bits; other seeds, other random bits.
        exponents: uint8, as many as `x` has entries; is overwritten.
        bits: uint8, ceil(numel / 8); is overwritten.
    """


@kernel("out")
def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each (exponents, bits), decoded, to the flat `out`, in order; `fresh`: to zeros."""
