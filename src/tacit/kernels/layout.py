"""How buckets are laid out, in plain torch: rows, and codes of a few bits strung together lane by lane.

As few codes of b bits as make whole bytes are strung together, the first one lowest: g = 8 / gcd(b, 8) codes
make b / gcd(b, 8) bytes. With m = ceil(entries / g) of a bucket, lane i holds the entries i, m + i, ...,
(g - 1) m + i, and byte k of it lies at k * m + i. So packing is element-wise work on a few long vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

ROWS = 512
"""Buckets that the plain torch versions work on at a time."""


@cache
def group(bits: int) -> int:
    """How many codes are strung together: 2 of four bits, 4 of two or six, 1 of eight, else 8."""
    return 8 // gcd(bits, 8)


def code_bytes(numel: int, bits: int) -> int:
    """The bytes of packed codes, for buckets of a multiple of 8 entries."""
    return -(-numel // group(bits)) * bits // gcd(bits, 8)


def buckets(numel: int, bucket: int) -> int:
    """How many buckets, the last one shorter."""
    return -(-numel // bucket)


def cuts(numel: int, bucket: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of whole buckets, a few hundred at a time; then of what is left."""
    whole = numel - numel % bucket
    edges = [*range(0, whole, ROWS * bucket), whole]
    yield from pairwise(edges if numel == whole else [*edges, numel])


def rows(x: Tensor, bucket: int) -> Iterator[tuple[slice, Tensor]]:
    """Buckets as rows of views, as `cuts` has them; each with the numbers of its buckets."""
    for start, stop in cuts(x.numel(), bucket):
        count = buckets(stop - start, bucket)
        yield slice(start // bucket, start // bucket + count), x[start:stop].view(count, -1)


def strung(codes: Tensor, bits: int) -> Tensor:
    """The bytes (flat) of rows of codes (int64)."""
    count = group(bits)
    lanes = -(-codes.shape[1] // count)
    codes = torch.nn.functional.pad(codes, (0, count * lanes - codes.shape[1])).view(-1, count, lanes)
    word = torch.zeros_like(codes[:, 0])
    for j in range(count):
        word |= codes[:, j] << (bits * j)
    parts = [(word >> (8 * k)) & 255 for k in range(bits * count // 8)]
    return torch.stack(parts, dim=1).view(-1).to(torch.uint8)


def unstrung(packed: Tensor, bits: int, size: int) -> Tensor:
    """The codes (int64, rows x size) of rows whose bytes are given."""
    count = group(bits)
    parts = packed.view(-1, bits * count // 8, -(-size // count)).to(torch.int64)
    word = torch.zeros_like(parts[:, 0])
    for k in range(parts.shape[1]):
        word |= parts[:, k] << (8 * k)
    codes = torch.stack([(word >> (bits * j)) & ((1 << bits) - 1) for j in range(count)], dim=1)
    return codes.view(len(parts), -1)[:, :size]


def divided(y: Tensor, by: float) -> Tensor:
    """y / by, rounded correctly: by a number of the host, CUDA would multiply by its inverse."""
    return y / y.new_full((), by)


def lane_sums(y: Tensor, bucket: int) -> Tensor:
    """The sum of each row, in an order that compiled code keeps to: down bucket / 8 lanes, then in halves."""
    y = torch.nn.functional.pad(y, (0, bucket - y.shape[1])).view(-1, 8, bucket // 8)
    total = torch.zeros_like(y[:, 0])
    for j in range(8):
        total += y[:, j]
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]
