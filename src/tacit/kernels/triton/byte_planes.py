"""`kernels.byte_planes` on a GPU: the host's bytes, and nothing waits, as all lengths stay there.

The planes of a tensor are rows, and each is coded in pieces by the kernels of `entropy`. What a plane takes
is known only when it is coded, so all of a message is moved together afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels import byte_planes, entropy
from tacit.kernels.reference.entropy import STREAMS
from tacit.kernels.triton.entropy import (
    ALL,
    PIECES,
    SIZE,
    SOME,
    TABLE,
    S,
    decode_kernel,
    encode_kernel,
    filled,
    got,
    owners_of,
    put,
)
from tacit.kernels.triton.launch import jit, launch

RAW, CODED, SAME = (tl.constexpr(each) for each in (byte_planes.RAW, byte_planes.CODED, byte_planes.SAME))
FEW, ALIKE = tl.constexpr(byte_planes.FEW), tl.constexpr(byte_planes.ALIKE)
WHICH, TABLED = tl.constexpr(TABLE // 8), tl.constexpr(1 + TABLE // 8)
"""The bytes that say which values occur, and where their shares begin."""
A_PIECE = tl.constexpr(2 + 4 * STREAMS)
"""The bytes of a piece before its words."""


@jit
def count_kernel(
    planes: tensor, counts: tensor, seen: tensor, n: tensor, per: tensor, step: tensor,
    SOME: tl.constexpr, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """How often each value occurs in each plane, and how often in every `step`-th byte."""
    plane = tl.program_id(0) // per
    i = tl.program_id(0) % per * SOME + tl.arange(0, SOME)
    there = i < n
    value = tl.load(planes + plane.to(tl.int64) * n + i, there, 0).to(tl.int32)
    row = plane * TABLE + tl.arange(0, TABLE)
    found = tl.histogram(value, TABLE, there)
    tl.atomic_add(counts + row, found, found > 0, sem="relaxed")
    sample = tl.histogram(value, TABLE, there & (i % step == 0))
    tl.atomic_add(seen + row, sample, sample > 0, sem="relaxed")


@jit
def shares_kernel(
    counts: tensor, seen: tensor, table: tensor, kinds: tensor, n: tensor, TABLE: tl.constexpr
) -> None:  # fmt: skip
    """The table of a plane, and how it is written unless it is longer so."""
    plane, value = tl.program_id(0), tl.arange(0, TABLE)
    every = tl.load(counts + plane * TABLE + value).to(tl.int64)
    total = tl.maximum(tl.sum(every, axis=0), 1)
    shares = filled(tl.maximum(every * ALL // total, (every > 0).to(tl.int64)), ALL)
    tl.store(table + plane * 2 * TABLE + value, shares.to(tl.int32))
    tl.store(table + plane * 2 * TABLE + TABLE + value, (tl.cumsum(shares, axis=0) - shares).to(tl.int32))
    some = tl.load(seen + plane * TABLE + value).to(tl.int64)
    pairs = tl.sum(some, axis=0)
    dense = ALIKE * tl.sum(some * (some - 1), axis=0) < pairs * (pairs - 1)
    kind = tl.where((n <= FEW) | dense, RAW, CODED)
    tl.store(kinds + plane, tl.where((n > 0) & (tl.max(every, axis=0) == n), SAME, kind))


@jit
def layout_kernel(
    kinds: tensor, table: tensor, ends: tensor, at: tensor, starts: tensor, end: tensor,
    n: tensor, planes: tensor, pieces: tensor, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """Where each plane begins in the message, and which are left as they are after all."""
    begin, value = tl.load(at), tl.arange(0, TABLE)
    for plane in range(planes):
        kind = tl.load(kinds + plane)
        occur = tl.sum((tl.load(table + plane * 2 * TABLE + value) > 0).to(tl.int32), axis=0)
        used = tl.load(ends + plane * pieces + pieces - 1)
        coded = TABLED + 2 * occur + A_PIECE * pieces + 2 * used
        kind = tl.where((kind == CODED) & (coded > n), RAW, kind)
        tl.store(kinds + plane, kind)
        tl.store(starts + plane, begin)
        begin += tl.where(kind == CODED, coded, tl.where(kind == SAME, 2, 1 + n))
    tl.store(end, begin)


@jit
def join_kernel(
    planes: tensor, kinds: tensor, table: tensor, words: tensor, states: tensor, counts: tensor,
    ends: tensor, starts: tensor, message: tensor, n: tensor, pieces: tensor,
    PIECE: tl.constexpr, PER: tl.constexpr, SIZE: tl.constexpr, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """Move a message together: a part of a piece's words, or of a plane as it is; and what is before them."""
    row, part = tl.program_id(0) // PER, tl.program_id(0) % PER
    plane, piece = row // pieces, row % pieces
    kind, begin = tl.load(kinds + plane), tl.load(starts + plane)
    planes += plane.to(tl.int64) * n
    j = part * SIZE + tl.arange(0, SIZE)
    i = piece * PIECE + j
    raw = (kind == RAW) & (j < PIECE) & (i < n)
    tl.store(message + begin + 1 + i, tl.load(planes + i, raw, 0), raw)
    value = tl.arange(0, TABLE)
    share = tl.load(table + plane * 2 * TABLE + value)
    occurs = (share > 0).to(tl.int32)
    ahead = begin + TABLED + 2 * tl.sum(occurs, axis=0)
    head = ahead + A_PIECE * pieces
    count, end = tl.load(counts + row), tl.load(ends + row)
    there = (kind == CODED) & (j < count)
    word = tl.load(words + row.to(tl.int64) * PIECE + PIECE - count + j, there, 0).to(tl.int32)
    put(message, head + 2 * (end - count + j), word, 2, there)
    stream = tl.arange(0, S)
    first = (stream < S) & (kind == CODED) & (part == 0)
    state = tl.load(states + row * S + stream, first, 0)
    put(message, head - 4 * S * (pieces - piece) + 4 * stream, state, 4, first)
    put(message, ahead + 2 * piece + 0 * stream, count + 0 * stream, 2, first & (stream == 0))
    if (part == 0) & (piece == 0):
        tl.store(message + begin, kind.to(tl.uint8))
        tl.store(message + begin + 1, tl.load(planes, kind == SAME, 0), kind == SAME)
        eight = tl.arange(0, 8)
        bits = tl.sum(tl.reshape(occurs, (WHICH, 8)) << (7 - eight)[None, :], axis=1)
        byte = tl.arange(0, WHICH)
        tl.store(message + begin + 1 + byte, bits.to(tl.uint8), (byte < WHICH) & (kind == CODED))
        place = begin + TABLED + 2 * (tl.cumsum(occurs, axis=0) - occurs)
        put(message, place, share, 2, (occurs > 0) & (kind == CODED))


@jit
def read_kernel(
    message: tensor, at: tensor, table: tensor, counts: tensor, heads: tensor, good: tensor, end: tensor,
    lengths: tensor, n: tensor, planes: tensor, pieces: tensor, room: tensor,
    TABLE: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """Each plane's table, the words of its pieces, and where its bytes or words begin.

    A program for each message; from one to the next there are `room` bytes.

    `good`: 0 where the plane is damaged, 1 where it is coded, 2 where its bytes follow, 3 where one follows.
    `end`: behind the last plane; -1 where one is damaged.
    """
    peer = tl.program_id(0).to(tl.int64)
    row, length = peer * planes, tl.load(lengths + peer)
    message, table, counts = message + peer * room, table + row * 2 * TABLE, counts + row * pieces
    heads, good = heads + row, good + row
    begin, value = tl.load(at + peer), tl.arange(0, TABLE)
    for plane in range(planes):
        inside = (begin >= 0) & (begin < length)
        kind = tl.where(inside, tl.load(message + begin, inside, 0).to(tl.int32), -1)
        coded = kind == CODED
        byte = begin + 1 + value // 8
        which = tl.load(message + byte, coded & (byte < length), 0).to(tl.int32)
        occurs = (which >> (7 - value % 8)) & 1
        place = begin + TABLED + 2 * (tl.cumsum(occurs, axis=0) - occurs)
        share = got(message, place, 2, coded & (occurs > 0) & (place + 1 < length)).to(tl.int32)
        tl.store(table + plane * 2 * TABLE + value, share)
        tl.store(table + plane * 2 * TABLE + TABLE + value, tl.cumsum(share, axis=0) - share)
        ahead = begin + TABLED + 2 * tl.sum(occurs, axis=0)
        used = begin * 0
        for first in range(0, pieces, PIECES):
            piece = first + tl.arange(0, PIECES)
            spot = ahead + 2 * piece
            count = got(message, spot, 2, (piece < pieces) & coded & (spot + 1 < length)).to(tl.int32)
            tl.store(counts + plane * pieces + piece, count, piece < pieces)
            used += tl.sum(count, axis=0)
        head = ahead + A_PIECE * pieces
        after = tl.where(coded, head + 2 * used, begin + tl.where(kind == SAME, 2, 1 + n))
        right = (kind == RAW) | (kind == SAME) | (coded & (tl.sum(share, axis=0) == ALL))
        right = right & (after <= length)
        tl.store(heads + plane, tl.where(coded, head, begin + 1))
        tl.store(good + plane, tl.where(right, tl.where(coded, 1, tl.where(kind == RAW, 2, 3)), 0))
        begin = tl.where(right, after, -1)
    tl.store(end + peer, begin)


@jit
def copy_kernel(
    message: tensor, heads: tensor, good: tensor, planes: tensor, n: tensor, per: tensor, width: tensor,
    room: tensor, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Planes that are not coded, of which each message has `width`."""
    plane = tl.program_id(0) // per
    message += (plane // width).to(tl.int64) * room
    i = tl.program_id(0) % per * SIZE + tl.arange(0, SIZE)
    kind = tl.load(good + plane)
    there = (i < n) & (kind >= 2)
    found = tl.load(message + tl.load(heads + plane) + tl.where(kind == 2, i, 0), there, 0)
    tl.store(planes + plane.to(tl.int64) * n + i, found, there)


def encode(planes: Tensor, message: Tensor, at: Tensor) -> Tensor:
    """Write planes (rows of uint8) into `message` from byte `at` (int32) on; returns where they end."""
    width, n = planes.shape
    pieces, tables = byte_planes.piece_count(n), (width, TABLE)
    seen, found = (torch.zeros(tables, dtype=torch.int32, device=planes.device) for _ in range(2))
    table, kinds, starts = _empty(planes, width, 2 * TABLE), _empty(planes, width), _empty(planes, width)
    words = _empty(planes, width, pieces * entropy.PIECE, dtype=torch.uint16)
    states, counts, end = (
        _empty(planes, width, pieces, STREAMS),
        _empty(planes, width, pieces),
        _empty(planes),
    )
    per, step = triton.cdiv(n, SOME), max(1, n // byte_planes.SEEN)
    launch(
        count_kernel, width * per, planes, planes, found, seen, n, per, step, SOME=SOME, TABLE=TABLE,
    )  # fmt: skip
    launch(shares_kernel, width, planes, found, seen, table, kinds, n, TABLE=TABLE)
    launch(
        encode_kernel, width * triton.cdiv(pieces, PIECES), planes, planes, table, words, states, counts, n,
        pieces, n, 0, PIECE=entropy.PIECE, PIECES=PIECES, BITS=8, TABLE=TABLE, num_warps=1,
    )  # fmt: skip
    ends = counts.cumsum(1, dtype=torch.int32)
    launch(
        layout_kernel, 1, planes, kinds, table, ends, at, starts, end, n, width, pieces, TABLE=TABLE,
        num_warps=1,
    )  # fmt: skip
    per = triton.cdiv(entropy.PIECE, SIZE)
    launch(
        join_kernel, width * pieces * per, planes, planes, kinds, table, words, states, counts, ends, starts,
        message, n, pieces, PIECE=entropy.PIECE, PER=per, SIZE=SIZE, TABLE=TABLE,
    )  # fmt: skip
    return end


def decode(messages: Tensor, lengths: Tensor, at: Tensor, planes: Tensor) -> Tensor:
    """Read each message's planes (rows of uint8) from its byte `at` (int32) on.

    Returns:
        Where they end, -1 for a message that is damaged.
    """
    peers, width, n = planes.shape
    rows, pieces, room = peers * width, byte_planes.piece_count(n), messages.stride(0)
    table, counts = _empty(planes, rows, 2 * TABLE), _empty(planes, rows, pieces)
    heads, good, end = _empty(planes, rows), _empty(planes, rows), _empty(planes, peers)
    launch(
        read_kernel, peers, planes, messages, at, table, counts, heads, good, end, lengths, n, width, pieces,
        room, TABLE=TABLE, PIECES=SIZE,
    )  # fmt: skip
    owners, ends = owners_of(table), counts.cumsum(1, dtype=torch.int32)
    launch(
        decode_kernel, rows * triton.cdiv(pieces, PIECES), planes, messages, table, owners, counts, ends,
        heads, good, planes, n, pieces, 0, width, room, PIECE=entropy.PIECE, PIECES=PIECES, BITS=8,
        TABLE=TABLE, num_warps=1,
    )  # fmt: skip
    per = triton.cdiv(n, SIZE)
    launch(copy_kernel, rows * per, planes, messages, heads, good, planes, n, per, width, room, SIZE=SIZE)
    return torch.where((good.view(peers, width) > 0).all(1), end, -1)


def _empty(planes: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=planes.device)
