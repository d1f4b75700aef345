"""A sign and one of two magnitudes an entry, packed, with both magnitudes of each bucket.

The magnitudes are the means of those above the bucket's mean magnitude, and of the others, in bf16. A code
has bit 0 where its entry is of the larger ones, and bit 1 where it is negative; codes are packed as `layout`
tells. A bucket whose largest magnitude is below 2^-126 sends zeros; one with NaN or infinity the largest
numbers.

On a GPU plain torch runs: few values are sent so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.dispatch import addresses, numba_kernels, numba_takes_fp32, warm_up
from tacit.kernels.layout import bucket_count, code_bytes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.reference import two_magnitudes as reference

BITS = reference.BITS


def encode_magnitudes(x: Tensor, bucket: int, codes: Tensor, units: Tensor) -> None:
    """Write the codes of the flat `x` to `codes` (uint8), and each bucket's two means to `units` (bf16).

    `bucket`: entries that share them, a power of two from 64 on.
    """
    if x.is_meta:
        warm_up("two_magnitudes")
    elif numba_takes_fp32(x):
        kernels = numba_kernels("two_magnitudes")
        kernels.encode(x.data_ptr(), x.numel(), bucket, codes.data_ptr(), units.data_ptr())
    else:
        reference.encode_magnitudes(x, bucket, codes, units)


def add_magnitudes_(
    payloads: Sequence[Sequence[Tensor]], bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """Add `weight` times each (codes, units), decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        check_magnitudes(payload, bucket, out.numel())
    if numba_takes_fp32(out):
        codes, units = map(addresses, zip(*payloads, strict=True))
        kernels = numba_kernels("two_magnitudes")
        kernels.add(codes, units, bucket, weight, fresh, out.data_ptr(), out.numel())
    else:
        reference.add_magnitudes_(payloads, bucket, weight, out, fresh)


def check_magnitudes(payload: Sequence[Tensor], bucket: int, numel: int) -> None:
    """Refuse a payload that is not of so many entries."""
    codes = ("signs", code_bytes(numel, BITS), torch.uint8)
    expect_parts(payload, numel, codes, ("magnitudes", 2 * bucket_count(numel, bucket), torch.bfloat16))
