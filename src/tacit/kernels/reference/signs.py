"""`kernels.signs` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.payload_layout import BLOCK, bucket_rows, pack_codes, unpack_codes
from tacit.kernels.payloads import SignPayload
from tacit.kernels.reference.rounding import LARGEST, divide, lane_sums


def encode_signs(
    x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None, keep_zeros: bool = False,
    residual: Tensor | None = None, new_residual: Tensor | None = None, subtract: bool = True,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    if residual is not None and new_residual is not None:
        encode_signs(torch.add(x, residual, out=new_residual), bits, highs, lows, keep_zeros)
        add_signs_([(bits, highs, lows)] * subtract, -1.0, new_residual, fresh=False)
        return
    for blocks, row in bucket_rows(x, BLOCK):
        positive = row >= 0
        share = row.to(torch.promote_types(row.dtype, torch.float32)) * 2.0**-9
        codes, chosen = positive, torch.ones_like(positive)
        if keep_zeros:
            there, second = row != 0, _in_second_half(row)
            sums = [lane_sums(torch.where(second == half, share.abs(), 0.0), BLOCK) for half in (False, True)]
            half, mixed = (sums[1] > sums[0])[:, None], (there.any(1) & ~there.all(1))[:, None]
            chosen = ~mixed | (there & (second == half))
            apart = _other_half(there & (second == half)) | _whole(positive & (second == half))
            codes = torch.where(mixed, apart, _whole(positive))
        packed = pack_codes(codes.to(torch.int64), 1)
        start = blocks.start * BLOCK // 8
        bits[start : start + packed.numel()] = packed
        if lows is None:
            highs[blocks] = _mean(torch.where(chosen, share.abs(), 0.0), chosen.sum(1))
        else:
            up, down = positive & chosen, ~positive & chosen
            highs[blocks] = _mean(torch.where(up, share, 0.0), up.sum(1))
            lows[blocks] = -_mean(torch.where(down, -share, 0.0), down.sum(1))
        if keep_zeros:
            pattern = highs[blocks].view(torch.int32)
            flagged = pattern & ~1 | half[:, 0] | -(2**31)
            pattern.copy_(torch.where(mixed[:, 0], flagged, pattern))


def _in_second_half(row: Tensor) -> Tensor:
    """Whether entries of the rows are packed into the upper four bits."""
    return torch.arange(row.shape[1], device=row.device) >= 4 * -(-row.shape[1] // 8)


def _whole(codes: Tensor) -> Tensor:
    """Rows of codes, filled up to whole bytes."""
    return torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))


def _other_half(codes: Tensor) -> Tensor:
    """The same with the upper four bits of each byte in place of the lower, and these of those."""
    return _whole(codes).view(len(codes), 2, -1).flip(1).flatten(1)


def _mean(share: Tensor, count: Tensor) -> Tensor:
    sums = lane_sums(share, BLOCK)
    return (sums * (float(BLOCK) / count.clamp(min=1).to(share.dtype))).clamp_(max=LARGEST)


def encode_sign(
    x: Tensor, bits: Tensor, means: Tensor, magnitude: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.signs`."""
    encode_signs(x, bits, means, None, False, residual, new_residual, subtract=False)
    overall_mean(means, x.numel(), magnitude)
    if new_residual is not None:
        add_signs_([(bits, magnitude, None)], -1.0, new_residual, fresh=False)


def overall_mean(means: Tensor, numel: int, magnitude: Tensor) -> None:
    """The mean over all entries, of those over blocks; the last block may be shorter."""
    total = means.double()
    last = total[-1:].sum() * (means.numel() * BLOCK - numel)
    total = torch.nn.functional.pad(total, (0, (1 << max(means.numel() - 1, 0).bit_length()) - means.numel()))
    while total.numel() > 1:
        total = total[::2] + total[1::2]
    magnitude.copy_(divide(total * BLOCK - last, max(numel, 1)))


def add_signs_(payloads: Sequence[SignPayload], weight: float, out: Tensor, fresh: bool) -> None:
    """`kernels.signs.add_signs_`."""
    if fresh:
        out.zero_()
    for blocks, row in bucket_rows(out, BLOCK):
        start, size = blocks.start * BLOCK // 8, row.shape[1]
        for bits, highs, lows in payloads:
            packed = bits[start : start + len(row) * -(-size // 8)]
            values = _of(highs, blocks)[:, None]
            high = values.abs().to(out.dtype) * weight
            low = -high if lows is None else (_of(lows, blocks).to(out.dtype) * weight).unsqueeze(1)
            codes = unpack_codes(packed, 1, 8 * -(-size // 8)).bool()
            sent = torch.where(codes[:, :size], high, low)
            mixed, half = values.signbit(), values.float().view(torch.int32) & 1 == 1
            there = _other_half(codes)[:, :size] & (_in_second_half(row) == half)
            row += torch.where(there | ~mixed, sent, 0.0)


def _of(values: Tensor, blocks: slice) -> Tensor:
    return values if values.numel() == 1 else values[blocks]
