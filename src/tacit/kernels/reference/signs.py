"""`kernels.signs` in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.kernels.layout import BLOCK, bucket_rows, pack_codes, unpack_codes
from tacit.kernels.payloads import SignPayload
from tacit.kernels.reference.rounding import LARGEST, divide, lane_sums


def encode_signs(x: Tensor, bits: Tensor, highs: Tensor, lows: Tensor | None) -> None:
    """`kernels.signs.encode_signs`."""
    for blocks, row in bucket_rows(x, BLOCK):
        positive = row >= 0
        packed = pack_codes(positive.to(torch.int64), 1)
        start = blocks.start * BLOCK // 8
        bits[start : start + packed.numel()] = packed
        share = row.to(torch.promote_types(row.dtype, torch.float32)) * 2.0**-9
        if lows is None:
            highs[blocks] = _mean(share.abs(), torch.full_like(share[:, 0], row.shape[1]))
        else:
            highs[blocks] = _mean(torch.where(positive, share, 0.0), positive.sum(1))
            lows[blocks] = -_mean(torch.where(positive, 0.0, -share), (~positive).sum(1))


def _mean(share: Tensor, count: Tensor) -> Tensor:
    sums = lane_sums(share, BLOCK)
    return (sums * (float(BLOCK) / count.clamp(min=1).to(share.dtype))).clamp_(max=LARGEST)


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
            high = (_of(highs, blocks).to(out.dtype) * weight).unsqueeze(1)
            low = -high if lows is None else (_of(lows, blocks).to(out.dtype) * weight).unsqueeze(1)
            row += torch.where(unpack_codes(packed, 1, size).bool(), high, low)


def _of(values: Tensor, blocks: slice) -> Tensor:
    return values if values.numel() == 1 else values[blocks]
