"""How payloads are laid out, for all versions of the kernels: blocks, packed codes, positions.

**Codes** of b bits are packed lane by lane. As few codes as make whole bytes form a group, the first one
lowest: g = 8 / gcd(b, 8) codes make b / gcd(b, 8) bytes. With m = ceil(entries / g) of a bucket, lane i holds
the entries i, m + i, ..., (g - 1) m + i, and byte k of it lies at k * m + i. So packing is element-wise work
on a few long vectors.

Codes of three values are packed by fives, as 3^5 = 243: lane i of m = ceil(entries / 5) holds the entries i,
m + i, ..., 4 m + i, and its byte is c0 + 3 c1 + 9 c2 + 27 c3 + 81 c4.

**Positions** that rise are written in one of four formats. Which one follows from how many there are among
how many entries, so that the size is known beforehand: a bitmap; low and high parts (Elias 1974, Fano 1971),
with low parts of one or two bytes; or int32. The low parts are the lowest byte, or two, of each position. The
rest of the j-th position, which only ever rises, is a 1 at bit rest + j of the bits after them. That is
within 2 bits an entry of the least there can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

BLOCK = 512
"""Entries that share their scale, in the kernels that leave no choice: signs, int8, exponents."""
ROWS = 512
"""Buckets that the plain torch versions work on at a time."""
BITMAP, INT32 = 0, 4
"""Formats of positions, by the whole bytes that each position takes; 1 and 2 are low and high parts."""


# ---- buckets of entries that share a scale --------------------------------------------------------------


def bucket_count(numel: int, bucket: int) -> int:
    """How many buckets of `bucket` entries, the last one shorter."""
    return -(-numel // bucket)


@cache
def block_count(numel: int) -> int:
    """How many blocks of 512 entries, the last one shorter."""
    return -(-numel // BLOCK)


def bucket_rows(x: Tensor, bucket: int) -> Iterator[tuple[slice, Tensor]]:
    """Whole buckets as rows of a view, a few hundred at a time, then the rest; and which buckets they are."""
    whole = x.numel() - x.numel() % bucket
    edges = [*range(0, whole, ROWS * bucket), whole]
    for start, stop in pairwise(edges if x.numel() == whole else [*edges, x.numel()]):
        count = bucket_count(stop - start, bucket)
        yield slice(start // bucket, start // bucket + count), x[start:stop].view(count, -1)


# ---- codes ----------------------------------------------------------------------------------------------


@cache
def codes_per_group(bits: int) -> int:
    """How many codes make whole bytes: 2 of four bits, 4 of two or six, 1 of eight, else 8."""
    return 8 // gcd(bits, 8)


def code_bytes(numel: int, bits: int) -> int:
    """The bytes of packed codes, for buckets of a multiple of 8 entries."""
    return -(-numel // codes_per_group(bits)) * bits // gcd(bits, 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The bytes (flat) of rows of codes (int64)."""
    count = codes_per_group(bits)
    lanes = -(-codes.shape[1] // count)
    codes = torch.nn.functional.pad(codes, (0, count * lanes - codes.shape[1])).view(-1, count, lanes)
    word = torch.zeros_like(codes[:, 0])
    for j in range(count):
        word |= codes[:, j] << (bits * j)
    parts = [(word >> (8 * k)) & 255 for k in range(bits * count // 8)]
    return torch.stack(parts, dim=1).view(-1).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, size: int) -> Tensor:
    """The codes (int64, rows x size) of rows whose bytes are given."""
    count = codes_per_group(bits)
    parts = packed.view(-1, bits * count // 8, -(-size // count)).to(torch.int64)
    word = torch.zeros_like(parts[:, 0])
    for k in range(parts.shape[1]):
        word |= parts[:, k] << (8 * k)
    codes = torch.stack([(word >> (bits * j)) & ((1 << bits) - 1) for j in range(count)], dim=1)
    return codes.view(len(parts), -1)[:, :size]


TRITS = 5
"""Codes of three values in a byte."""


def block_bytes(size: int, bits: int) -> int:
    """The bytes of the packed codes of a block of so many entries; of 2 bits as three values."""
    return -(-size // TRITS) if bits == 2 else code_bytes(size, bits)


@cache
def blocks_bytes(numel: int, bits: int) -> int:
    """The bytes of the packed codes of `numel` entries in blocks of 512."""
    whole, rest = divmod(numel, BLOCK)
    return whole * block_bytes(BLOCK, bits) + block_bytes(rest, bits)


def pack_trits(codes: Tensor) -> Tensor:
    """The bytes (flat) of rows of codes from 0 to 2 (int64)."""
    lanes = -(-codes.shape[1] // TRITS)
    codes = torch.nn.functional.pad(codes, (0, TRITS * lanes - codes.shape[1])).view(-1, TRITS, lanes)
    total = torch.zeros_like(codes[:, 0])
    for j in range(TRITS):
        total += codes[:, j] * 3**j
    return total.view(-1).to(torch.uint8)


def unpack_trits(packed: Tensor, size: int) -> Tensor:
    """The codes (int64, rows x size) of rows whose bytes are given."""
    rest = packed.view(-1, 1, -(-size // TRITS)).to(torch.int64)
    codes = []
    for _ in range(TRITS):
        codes.append(rest % 3)
        rest = torch.div(rest, 3, rounding_mode="floor")
    return torch.cat(codes, dim=1).view(len(rest), -1)[:, :size]


# ---- positions ------------------------------------------------------------------------------------------


@cache
def position_sizes(numel: int, k: int) -> dict[int, int]:
    """Bytes of each format for up to `k` positions among `numel` entries.

    Bitmap: ceil(n / 8). Low parts of w bytes: w k + ceil((k + (n - 1) // 256^w) / 8). int32: 4 k.
    """
    parts = {low: low * k + -(-(k + max(numel - 1, 0) // 256**low) // 8) for low in (1, 2)}
    return {BITMAP: -(-numel // 8), **parts, INT32: 4 * k}


@cache
def position_format(numel: int, k: int) -> int:
    """The shortest format; of equal ones the first."""
    sizes = position_sizes(numel, k)
    return min(sizes, key=lambda each: sizes[each])


@cache
def position_bytes(numel: int, k: int) -> int:
    """How many bytes up to `k` positions among `numel` entries take."""
    return position_sizes(numel, k)[position_format(numel, k)]
