"""`kernels.narrow` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.kernels.payload_layout import BLOCK, bucket_rows
from tacit.kernels.philox import random_uint16


def round_at_random(x: Tensor, seed: int, out: Tensor) -> None:
    """See `kernels.narrow`."""
    for blocks, row in bucket_rows(x, BLOCK):
        count, size = row.shape
        start = blocks.start * BLOCK
        random = random_uint16(seed, start // 8, count, BLOCK // 8, -(-size // 8), x.device)[:, :size]
        above = (row.view(torch.int32) + random.to(torch.int32)) >> 16
        above = above.masked_fill(row.isnan(), 0x7FC0)
        out[start : start + row.numel()] = above.to(torch.int16).view(torch.bfloat16).view(-1)
