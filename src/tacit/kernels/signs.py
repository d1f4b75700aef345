"""Signs, with one or two values for each block of 512 entries; also with error feedback, in one pass.

Bits are packed as `layout` tells, 1 where an entry is not negative (so not for NaN). The values are the mean
magnitude, or apart the mean of what is not negative and of what is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels.jit import address, addresses, half
from tacit.kernels.layout import buckets, divided, lane_sums, rows, strung, unstrung
from tacit.kernels.levels import HUGE
from tacit.kernels.payloads import expect
from tacit.kernels.pick import by_triton, fits32, fits_triton, path, warming

BLOCK = 512
"""Entries that share their values."""


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.split  # noqa: F401


def encode_signs(x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None) -> None:
    """Write one bit an entry of the flat `x`, and the values of each block (fp32).

    Args:
        highs: for the mean magnitude of each block; where there are `lows`, for the mean of its entries that
            are not negative, and `lows` for that of those that are (0 where there are none).
    """
    if x.is_meta:
        warm_up(warming())
    elif fits32(x):
        split = half("split")
        low = 0 if lows is None else address(lows)
        split.encode(address(x), 0, 0, x.numel(), address(bits), address(highs), low, False)
    elif not (fits_triton(x) and by_triton("signs.encode", x, None, None, bits, highs, lows, False)):
        encode_signs_torch(x, bits, highs, lows)


def encode_signs_owed(
    x: Tensor,
    residual: Tensor,
    new_residual: Tensor,
    bits: Tensor,
    highs: Tensor,
    lows: Tensor | None,
    keep: bool,
) -> None:
    """Encode x + residual, and write to `owed` what of it is not said; with `keep` false, all of it."""
    if x.is_meta:
        warm_up(warming())
    elif fits32(x, residual, new_residual):
        split = half("split")
        low = 0 if lows is None else address(lows)
        here, before, after = address(x), address(residual), address(new_residual)
        split.encode(here, before, after, x.numel(), address(bits), address(highs), low, keep)
    elif not (
        fits_triton(x, residual, new_residual)
        and by_triton("signs.encode", x, residual, new_residual, bits, highs, lows, keep)
    ):
        torch.add(x, residual, out=new_residual)
        encode_signs_torch(new_residual, bits, highs, lows)
        if keep:
            add_signs_torch_([(bits, highs, lows)], -1.0, new_residual, fresh=False)


def encode_sign(x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor) -> None:
    """Write one bit an entry of the flat `x`, and the mean magnitude of all to `magnitude` (one fp32).

    `means` is overwritten: with that of each block.
    """
    if x.is_meta:
        warm_up(warming())
    elif fits32(x):
        _compiled_one(x, 0, 0, bits, means, magnitude)
    elif not (fits_triton(x) and by_triton("signs.encode_one", x, None, None, bits, means, magnitude)):
        encode_signs_torch(x, bits, means, None)
        overall_torch(means, x.numel(), magnitude)


def encode_sign_owed(
    x: Tensor, residual: Tensor, new_residual: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor
) -> None:
    """Encode x + residual, and write to `owed` what of it is not said."""
    if x.is_meta:
        warm_up(warming())
    elif fits32(x, residual, new_residual):
        _compiled_one(x, address(residual), address(new_residual), bits, means, magnitude)
    elif not (
        fits_triton(x, residual, new_residual)
        and by_triton("signs.encode_one", x, residual, new_residual, bits, means, magnitude)
    ):
        torch.add(x, residual, out=new_residual)
        encode_signs_torch(new_residual, bits, means, None)
        overall_torch(means, x.numel(), magnitude)
        add_signs_torch_([(bits, magnitude, None)], -1.0, new_residual, fresh=False)


def _compiled_one(
    x: Tensor, residual: int, new_residual: int, bits: Tensor, means: Tensor, magnitude: Tensor
) -> None:
    numel = x.numel()
    half("split").encode_one(
        address(x), residual, new_residual, numel, address(bits), address(means), address(magnitude)
    )


Values = tuple[Tensor, Tensor, Tensor | None]
"""Bits, highs, and lows where they are not the highs negated. A single high counts for all blocks."""


def add_signs_(payloads: Sequence[Values], weight: float, out: Tensor, fresh: bool) -> None:
    """Add `weight` times what each payload says to the flat `out`, in order; `fresh`: to zeros."""
    if out.is_meta:
        return
    for payload in payloads:
        _check(payload, payloads[0][1].numel(), payloads[0][2] is not None, out)
    if fits32(out):
        split = half("split")

        bits, highs = addresses([p[0] for p in payloads]), addresses([p[1] for p in payloads])
        lows = addresses([p[2] for p in payloads if p[2] is not None])
        stride = min(1, payloads[0][1].numel() - 1)
        split.add(bits, highs, lows, stride, weight, fresh, address(out), out.numel())
    elif not (fits_triton(out) and by_triton("signs.add", payloads, weight, out, fresh)):
        add_signs_torch_(payloads, weight, out, fresh)


def _check(payload: Values, values: int, split: bool, out: Tensor) -> None:
    bits, highs, lows = payload
    numel, count = out.numel(), values if values == 1 else blocks(out.numel())
    kind = highs.dtype if highs.dtype == out.dtype and not fits32(out) else torch.float32
    expect(bits, "signs", -(-numel // 8), torch.uint8, numel)
    expect(highs, "values", count, kind, numel)
    if split != (lows is not None):
        raise PayloadError(
            f"a payload for {numel} entries has {2 + (lows is not None)} parts, where {2 + split} are "
            "expected: its sender has another compressor, or another version of tacit"
        )
    if lows is not None:
        expect(lows, "values of negative entries", count, torch.float32, numel)


# ---- the reference ------------------------------------------------------------------------------------


def encode_signs_torch(x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None) -> None:
    """The reference: `encode_signs` in plain torch, equal to the last bit."""
    for which, row in rows(x, BLOCK):
        up = row >= 0
        packed = strung(up.to(torch.int64), 1)
        start = which.start * BLOCK // 8
        bits[start : start + packed.numel()] = packed
        share = row.to(torch.promote_types(row.dtype, torch.float32)) * 2.0**-9
        if lows is None:
            highs[which] = _mean(share.abs(), torch.full_like(share[:, 0], row.shape[1]))
        else:
            highs[which] = _mean(torch.where(up, share, 0.0), up.sum(1))
            lows[which] = -_mean(torch.where(up, 0.0, -share), (~up).sum(1))


def _mean(share: Tensor, count: Tensor) -> Tensor:
    return (lane_sums(share, BLOCK) * (float(BLOCK) / count.clamp(min=1).to(share.dtype))).clamp_(max=HUGE)


def overall_torch(means: Tensor, numel: int, magnitude: Tensor) -> None:
    """The reference: the mean over all entries, of those over blocks; the last block may be shorter."""
    total = means.double()
    last = total[-1:].sum() * (means.numel() * BLOCK - numel)
    total = torch.nn.functional.pad(total, (0, (1 << max(means.numel() - 1, 0).bit_length()) - means.numel()))
    while total.numel() > 1:
        total = total[::2] + total[1::2]
    magnitude.copy_(divided(total * BLOCK - last, max(numel, 1)))


def add_signs_torch_(payloads: Sequence[Values], weight: float, out: Tensor, fresh: bool) -> None:
    """The reference: `add_signs_` in plain torch, equal to the last bit."""
    if fresh:
        out.zero_()
    for which, row in rows(out, BLOCK):
        start, size = which.start * BLOCK // 8, row.shape[1]
        for bits, highs, lows in payloads:
            packed = bits[start : start + len(row) * -(-size // 8)]
            high = (_of(highs, which).to(out.dtype) * weight).unsqueeze(1)
            low = -high if lows is None else (_of(lows, which).to(out.dtype) * weight).unsqueeze(1)
            row += torch.where(unstrung(packed, 1, size).bool(), high, low)


def _of(values: Tensor, which: slice) -> Tensor:
    return values if values.numel() == 1 else values[which]


def blocks(numel: int) -> int:
    """How many blocks, the last one shorter."""
    return buckets(numel, BLOCK)
