"""Signs, with one or two values for each block of 512 entries; also with error feedback, in one pass.

Bits are packed as `layout` tells, 1 where an entry is not negative (so not for NaN). The values are the mean
magnitude, or two: the mean of the entries that are not negative, and that of the others.

With `keep_zeros` zeros stay zeros. A block of which some entries are zeros sends the half of its entries that
has more magnitude: the sign bit of its first value tells of it, and the lowest bit of that which half it is,
the entries in the lower four bits of each byte or those in the upper. The other four bits tell which of these
are other than zero. The rest of the block decodes to zero, and waits where there is error feedback.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.dispatch import (
    addresses,
    numba_kernels,
    numba_takes_fp32,
    run_triton,
    triton_takes,
    warm_up,
)
from tacit.kernels.layout import block_count
from tacit.kernels.payloads import SignPayload, expect
from tacit.kernels.reference import signs as reference


def encode_signs(
    x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None, keep_zeros: bool = False
) -> None:
    """Write one bit an entry of the flat `x`, and the values of each block (fp32).

    Args:
        bits: uint8, ceil(numel / 8); is overwritten.
        highs: for the mean magnitude of each block; where there are `lows`, for the mean of its entries that
            are not negative, and `lows` for that of those that are (0 where there are none).
    """
    if x.is_meta:
        warm_up("signs")
    elif numba_takes_fp32(x):
        low = 0 if lows is None else lows.data_ptr()
        encode = numba_kernels("signs").encode
        encode(x.data_ptr(), 0, 0, x.numel(), bits.data_ptr(), highs.data_ptr(), low, False, keep_zeros)
    elif not (
        triton_takes(x) and run_triton("signs.encode", x, None, None, bits, highs, lows, False, keep_zeros)
    ):
        reference.encode_signs(x, bits, highs, lows, keep_zeros)


def encode_signs_with_residual(
    x: Tensor, residual: Tensor, new_residual: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None,
    subtract: bool, keep_zeros: bool = False,
) -> None:  # fmt: skip
    """Encode x + residual, and write to `new_residual` its difference to what the payload decodes to.

    With `subtract` false x + residual itself is written.
    """
    if x.is_meta:
        warm_up("signs")
    elif numba_takes_fp32(x, residual, new_residual):
        low = 0 if lows is None else lows.data_ptr()
        at, before, after = x.data_ptr(), residual.data_ptr(), new_residual.data_ptr()
        encode = numba_kernels("signs").encode
        encode(at, before, after, x.numel(), bits.data_ptr(), highs.data_ptr(), low, subtract, keep_zeros)
    elif not (
        triton_takes(x, residual, new_residual)
        and run_triton("signs.encode", x, residual, new_residual, bits, highs, lows, subtract, keep_zeros)
    ):
        torch.add(x, residual, out=new_residual)
        reference.encode_signs(new_residual, bits, highs, lows, keep_zeros)
        if subtract:
            reference.add_signs_([(bits, highs, lows)], -1.0, new_residual, fresh=False)


def encode_sign(x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor) -> None:
    """Write one bit an entry of the flat `x`, and the mean magnitude of all to `magnitude` (one fp32).

    `means` (fp32, one a block) is overwritten by the mean magnitude of each block.
    """
    if x.is_meta:
        warm_up("signs")
    elif numba_takes_fp32(x):
        _numba_encode_one(x, 0, 0, bits, means, magnitude)
    elif not (triton_takes(x) and run_triton("signs.encode_one", x, None, None, bits, means, magnitude)):
        reference.encode_signs(x, bits, means, None)
        reference.overall_mean(means, x.numel(), magnitude)


def encode_sign_with_residual(
    x: Tensor, residual: Tensor, new_residual: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor
) -> None:
    """Encode x + residual, and write to `new_residual` its difference to what the payload decodes to."""
    if x.is_meta:
        warm_up("signs")
    elif numba_takes_fp32(x, residual, new_residual):
        _numba_encode_one(x, residual.data_ptr(), new_residual.data_ptr(), bits, means, magnitude)
    elif not (
        triton_takes(x, residual, new_residual)
        and run_triton("signs.encode_one", x, residual, new_residual, bits, means, magnitude)
    ):
        torch.add(x, residual, out=new_residual)
        reference.encode_signs(new_residual, bits, means, None)
        reference.overall_mean(means, x.numel(), magnitude)
        reference.add_signs_([(bits, magnitude, None)], -1.0, new_residual, fresh=False)


def _numba_encode_one(
    x: Tensor, residual: int, new_residual: int, bits: Tensor, means: Tensor, magnitude: Tensor
) -> None:
    encode_one = numba_kernels("signs").encode_one
    encode_one(
        x.data_ptr(),
        residual,
        new_residual,
        x.numel(),
        bits.data_ptr(),
        means.data_ptr(),
        magnitude.data_ptr(),
    )


def add_signs_(payloads: Sequence[SignPayload], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times each payload, decoded, to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        _check(payload, payloads[0][1].numel(), payloads[0][2] is not None, out)
    if numba_takes_fp32(out):
        bits, highs = addresses([p[0] for p in payloads]), addresses([p[1] for p in payloads])
        lows = addresses([p[2] for p in payloads if p[2] is not None])
        stride = min(1, payloads[0][1].numel() - 1)
        numba_kernels("signs").add(bits, highs, lows, stride, weight, fresh, out.data_ptr(), out.numel())
    elif not (triton_takes(out) and run_triton("signs.add", payloads, weight, out, fresh)):
        reference.add_signs_(payloads, weight, out, fresh)


def _check(payload: SignPayload, values: int, split: bool, out: Tensor) -> None:
    bits, highs, lows = payload
    numel, count = out.numel(), values if values == 1 else block_count(out.numel())
    dtype = highs.dtype if highs.dtype == out.dtype and not numba_takes_fp32(out) else torch.float32
    expect(bits, "signs", -(-numel // 8), torch.uint8, numel)
    expect(highs, "values", count, dtype, numel)
    if split != (lows is not None):
        raise PayloadError(
            f"a payload for {numel} entries has {2 + (lows is not None)} parts, where {2 + split} are "
            "expected: its sender has another compressor, or another version of tacit"
        )
    if lows is not None:
        expect(lows, "values of negative entries", count, torch.float32, numel)
