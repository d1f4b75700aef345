"""`kernels.entropy` on a GPU: the host's bytes, and nothing waits, as the length stays there too.

A program counts, codes or decodes some pieces, each in eight streams. Their words are written where a piece
would begin if all were as long as can be, and are then moved together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels import entropy
from tacit.kernels.payload_layout import BLOCK, TRITS, block_bytes
from tacit.kernels.reference.entropy import LANES, LOWEST, SCALE_BITS, SLOTS, STREAMS
from tacit.kernels.triton.launch import jit, launch

SOME, PIECES, SIZE, TABLE = 4096, 4, 1024, 256
"""Groups that a program counts, pieces that one codes, bytes that one writes, rows of the table."""
SCALE, LOW, ALL, S = (tl.constexpr(each) for each in (SCALE_BITS, LOWEST, SLOTS, STREAMS))
SHARES = tl.constexpr(entropy.SHARES)
FEW, WIDE, MIDDLE = tl.constexpr(block_bytes(BLOCK, 2)), tl.constexpr(LANES), tl.constexpr(3 ** (TRITS - 1))
PADDED = tl.constexpr(TRITS * block_bytes(BLOCK, 2) - BLOCK)


@jit
def turned(group: tensor, i: tensor, blocks: tensor) -> tensor:
    """What whole blocks of 2 bits are padded with, and the middle level, exchanged; see `kernels.entropy`."""
    inside = (i // FEW < blocks) & (i % FEW >= FEW - PADDED)
    other = tl.where(group < MIDDLE, group + MIDDLE, tl.where(group < 2 * MIDDLE, group - MIDDLE, group))
    return tl.where(inside, other, group)


@jit
def place_of(i: tensor, size: tensor) -> tensor:
    """Of group `i` of 3 bits: its first byte, from there to the next one, and which of four it is."""
    block, whole = i // (4 * WIDE), size // (3 * WIDE)
    last = block >= whole
    lanes = tl.where(last, (size - whole * 3 * WIDE) // 3, WIDE)
    block = tl.where(last, whole, block)
    within = i - block * 4 * WIDE
    lanes = tl.maximum(lanes, 1)
    return block * 3 * WIDE + within % lanes, lanes, within // lanes


@jit
def group_at(
    codes: tensor, i: tensor, there: tensor, size: tensor, blocks: tensor, BITS: tl.constexpr
) -> tensor:
    """Group `i` of the packed codes, of `size` bytes; 0 where there is none."""
    if BITS == 3:
        at, lanes, j = place_of(i, size)
        word = tl.load(codes + at, there, 0).to(tl.int32)
        for k in tl.static_range(1, 3):
            word |= tl.load(codes + at + k * lanes, there, 0).to(tl.int32) << (8 * k)
        group = (word >> (6 * j).to(tl.int32)) & 63
    else:
        group = tl.load(codes + i, there, 0).to(tl.int32)
    if BITS == 2:
        group = turned(group, i, blocks)
    return group


@jit
def count_kernel(
    codes: tensor, counts: tensor, groups: tensor, size: tensor, blocks: tensor,
    BITS: tl.constexpr, SOME: tl.constexpr, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """How often each group occurs."""
    i = tl.program_id(0) * SOME + tl.arange(0, SOME)
    found = tl.histogram(group_at(codes, i, i < groups, size, blocks, BITS), TABLE, i < groups)
    tl.atomic_add(counts + tl.arange(0, TABLE), found, found > 0, sem="relaxed")


@jit
def filled(parts: tensor, total: tensor) -> tensor:
    """Parts that add up to the total, as the first of the largest gives or takes the difference."""
    first = tl.argmax(parts, axis=0, tie_break_left=True)
    here = tl.arange(0, parts.shape[0]) == first
    return parts + tl.where(here, total - tl.sum(parts, axis=0), 0)


@jit
def freqs_of(
    shares: tensor, table: tensor, RADIX: tl.constexpr, DIGITS: tl.constexpr, TABLE: tl.constexpr
) -> None:  # fmt: skip
    """Write a table's rows: how often a group occurs by the shares of its codes, and what is before it."""
    group, code = tl.arange(0, TABLE), tl.arange(0, 16)
    product, rest = tl.full((TABLE,), 1, tl.int64), group
    for _ in tl.static_range(DIGITS):
        mine = tl.where((rest % RADIX)[:, None] == code[None, :], shares[None, :], 0)
        product *= tl.sum(mine, axis=1).to(tl.int64)
        rest = rest // RADIX
    product = tl.where(rest == 0, product, 0)
    found = tl.maximum(product >> (12 * DIGITS - SCALE), (product > 0).to(tl.int64))
    freqs = filled(found, ALL)
    tl.store(table + group, freqs.to(tl.int32))
    tl.store(table + TABLE + group, (tl.cumsum(freqs, axis=0) - freqs).to(tl.int32))


@jit
def shares_kernel(
    counts: tensor, shares_of: tensor, table: tensor,
    RADIX: tl.constexpr, DIGITS: tl.constexpr, TABLE: tl.constexpr, CODES: tl.constexpr,
) -> None:  # fmt: skip
    """The shares of codes, of which each group counts for all that it is made of; and the table of groups."""
    rest, code = tl.arange(0, TABLE), tl.arange(0, 16)
    groups = tl.load(counts + rest)
    each = tl.zeros((16,), tl.int32)
    for _ in tl.static_range(DIGITS):
        is_digit = (rest % RADIX)[:, None] == code[None, :]
        each += tl.sum(tl.where(is_digit, groups[:, None], 0), axis=0)
        rest = rest // RADIX
    each = tl.where(code < CODES, each, 0).to(tl.int64)
    total = tl.maximum(tl.sum(each, axis=0), 1)
    shares = filled(tl.maximum(each * SHARES // total, (each > 0).to(tl.int64)), SHARES).to(tl.int32)
    tl.store(shares_of + code, shares)
    freqs_of(shares, table, RADIX, DIGITS, TABLE)


@jit
def encode_kernel(
    codes: tensor, table: tensor, words: tensor, states: tensor, counts: tensor,
    groups: tensor, pieces: tensor, size: tensor, blocks: tensor,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """The words of some pieces, from the end of each one's room backwards, their number, and the states.

    Where there are several planes, each of `groups` groups, all that belongs to one lies in a row of its own.
    """
    per = (pieces + PIECES - 1) // PIECES
    plane = (tl.program_id(0) // per).to(tl.int64)
    codes, table, words = codes + plane * groups, table + plane * 2 * TABLE, words + plane * pieces * PIECE
    states, counts = states + plane * pieces * S, counts + plane * pieces
    piece = tl.program_id(0) % per * PIECES + tl.arange(0, PIECES)
    stream = tl.arange(0, S)[None, :]
    inside, begin = (piece < pieces)[:, None], (piece.to(tl.int64) * PIECE)[:, None]
    x, taken = tl.full((PIECES, S), LOW, tl.uint32), piece * 0
    for back in range(PIECE // S):
        place = PIECE - S - back * S + stream
        there = inside & (begin + place < groups)
        group = group_at(codes, begin + place, there, size, blocks, BITS)
        f = tl.load(table + group, there, 1).to(tl.uint32)
        start = tl.load(table + TABLE + group, there, 0).to(tl.uint32)
        full = there & (x.to(tl.uint64) >= f.to(tl.uint64) << (32 - SCALE))
        flags = full.to(tl.int32)
        given = tl.sum(flags, axis=1)
        at = PIECE - (taken + given)[:, None] + tl.cumsum(flags, axis=1) - flags
        tl.store(words + begin + at, x.to(tl.uint16), full)
        x = tl.where(full, x >> 16, x)
        x = tl.where(there, ((x // f) << SCALE) + x % f + start, x)
        taken += given
    tl.store(states + piece[:, None] * S + stream, x.to(tl.int32, bitcast=True), inside)
    tl.store(counts + piece, taken, piece < pieces)


@jit
def put(message: tensor, at: tensor, value: tensor, BYTES: tl.constexpr, there: tensor) -> None:
    """A number, byte by byte, as what is before it makes it odd."""
    for k in tl.static_range(BYTES):
        tl.store(message + at + k, ((value >> (8 * k)) & 255).to(tl.uint8), there)


@jit
def join_kernel(
    codes: tensor, shares: tensor, words: tensor, states: tensor, counts: tensor, ends: tensor,
    message: tensor, length: tensor, pieces: tensor, size: tensor, head: tensor, ahead: tensor,
    PIECE: tl.constexpr, PER: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Move all of a message together; or write the packed codes, where they are no longer."""
    used = tl.load(ends + pieces - 1)
    packed = (size == 0) | (head + 2 * used >= size + 1)
    piece, part = tl.program_id(0) // PER, tl.program_id(0) % PER
    j = part * SIZE + tl.arange(0, SIZE)
    count, end = tl.load(counts + piece), tl.load(ends + piece)
    there = (j < count) & (packed == 0)
    word = tl.load(words + piece.to(tl.int64) * PIECE + PIECE - count + j, there, 0).to(tl.int32)
    put(message, head + 2 * (end - count + j), word, 2, there)
    stream = tl.arange(0, S)
    first = (stream < S) & (part == 0) & (packed == 0)
    state = tl.load(states + piece * S + stream, first, 0)
    put(message, head - 4 * S * (pieces - piece) + 4 * stream, state, 4, first)
    if (part == 0) & (packed == 0) & (piece < pieces - 1):
        tl.store(message + ahead + 2 * piece, (count & 255).to(tl.uint8))
        tl.store(message + ahead + 2 * piece + 1, (count >> 8).to(tl.uint8))
    if tl.program_id(0) == 0:
        code = tl.arange(0, 16)
        here = (1 + 2 * code < ahead) & (packed == 0)
        put(message, 1 + 2 * code, tl.load(shares + code), 2, here)
        tl.store(message, tl.where(packed, 0, 1).to(tl.uint8))
        tl.store(length, tl.where(packed, size + 1, head + 2 * used))
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(message + 1 + i, tl.load(codes + i, (i < size) & packed, 0), (i < size) & packed)


@jit
def got(message: tensor, at: tensor, BYTES: tl.constexpr, there: tensor) -> tensor:
    """`put`, back, in 32 bits."""
    value = tl.load(message + at, there, 0).to(tl.uint32)
    for k in tl.static_range(1, BYTES):
        value |= tl.load(message + at + k, there, 0).to(tl.uint32) << (8 * k)
    return value


@jit
def read_kernel(
    message: tensor, length: tensor, table: tensor, counts: tensor, heads: tensor, good: tensor,
    size: tensor, pieces: tensor, head: tensor, ahead: tensor, room: tensor,
    RADIX: tl.constexpr, DIGITS: tl.constexpr, TABLE: tl.constexpr, CODES: tl.constexpr, PIECES: tl.constexpr,
) -> None:  # fmt: skip
    """The table by a message's shares; the words of each piece; and whether all of it can be right.

    A program for each message; from one to the next there are `room` bytes.
    """
    peer = tl.program_id(0).to(tl.int64)
    message, length, table = message + peer * room, length + peer, table + peer * 2 * TABLE
    counts, heads, good = counts + peer * pieces, heads + peer, good + peer
    code = tl.arange(0, 16)
    kind, whole = tl.load(message), tl.load(length)
    packed = (kind == 0) & (whole == size + 1)
    coded = (kind == 1) & (whole >= head) & (whole < size + 1) & ((whole - head) % 2 == 0)
    shares = got(message, 1 + 2 * code, 2, (code < CODES) & coded).to(tl.int32)
    freqs_of(shares, table, RADIX, DIGITS, TABLE)
    left = (whole - head) // 2
    for first in range(0, pieces, PIECES):
        piece = first + tl.arange(0, PIECES)
        ahead_of = got(message, ahead + 2 * piece, 2, (piece < pieces - 1) & coded).to(tl.int32)
        tl.store(counts + piece, ahead_of, piece < pieces - 1)
        left -= tl.sum(ahead_of, axis=0)
    tl.store(counts + pieces - 1, left)
    coded = coded & (tl.sum(shares, axis=0) == SHARES) & (left >= 0)
    tl.store(heads, head)
    tl.store(good, tl.where(packed, 2, coded.to(tl.int32)))


@jit
def decode_kernel(
    message: tensor, table: tensor, owners: tensor, counts: tensor, ends: tensor, heads: tensor, good: tensor,
    out: tensor, groups: tensor, pieces: tensor, blocks: tensor, planes: tensor, room: tensor,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
) -> None:  # fmt: skip
    """The groups of some pieces; a message that does not end as it began is told in `good`.

    `heads`: where the words of each plane begin, behind its states. `planes`: how many a message has; from
    one message to the next there are `room` bytes.
    """
    per = (pieces + PIECES - 1) // PIECES
    plane = (tl.program_id(0) // per).to(tl.int64)
    message += plane // planes * room
    table, owners, out = table + plane * 2 * TABLE, owners + plane * ALL, out + plane * groups
    counts, ends, good = counts + plane * pieces, ends + plane * pieces, good + plane
    piece = tl.program_id(0) % per * PIECES + tl.arange(0, PIECES)
    stream = tl.arange(0, S)[None, :]
    head, coded = tl.load(heads + plane), tl.load(good) == 1
    inside, begin = ((piece < pieces) & coded)[:, None], (piece.to(tl.int64) * PIECE)[:, None]
    x = got(message, head - 4 * S * (pieces - piece)[:, None] + 4 * stream, 4, inside)
    count, end = tl.load(counts + piece, piece < pieces, 0), tl.load(ends + piece, piece < pieces, 0)
    at, used = (end - count)[:, None], end[:, None]
    for first in range(0, PIECE, S):
        there = inside & (begin + first + stream < groups)
        slot = (x & (ALL - 1)).to(tl.int32)
        group = tl.load(owners + slot, there, 0).to(tl.int32)
        i = begin + first + stream
        tl.store(out + i, (turned(group, i, blocks) if BITS == 2 else group).to(tl.uint8), there)
        f = tl.load(table + group, there, 0).to(tl.uint32)
        start = tl.load(table + TABLE + group, there, 0)
        y = tl.where(there, f * (x >> SCALE) + (slot - start).to(tl.uint32), x)
        low = there & (y < LOW)
        flags = low.to(tl.int32)
        place = at + tl.cumsum(flags, axis=1) - flags
        word = got(message, head + 2 * place, 2, low & (place < used))
        x = tl.where(low, (y << 16) | word, y)
        at += tl.sum(flags, axis=1)[:, None]
    wrong = inside & ((at != used) | (x != LOW))
    tl.atomic_min(
        good + 0 * stream + 0 * piece[:, None], 0 * stream + 0 * piece[:, None], wrong, sem="relaxed"
    )


@jit
def pack_kernel(
    message: tensor, groups: tensor, good: tensor, codes: tensor, size: tensor, count: tensor, room: tensor,
    per: tensor, BITS: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """The packed codes: those of a message that has them, or of groups; nothing of a damaged one."""
    peer = (tl.program_id(0) // per).to(tl.int64)
    message, groups, good, codes = (
        message + peer * room,
        groups + peer * count,
        good + peer,
        codes + peer * size,
    )
    i = tl.program_id(0) % per * SIZE + tl.arange(0, SIZE)
    there, kind = i < size, tl.load(good)
    found = tl.load(message + 1 + i, there & (kind == 2), 0)
    if BITS == 3:
        block, whole = i // (3 * WIDE), size // (3 * WIDE)
        lanes = tl.maximum(tl.where(block >= whole, (size - whole * 3 * WIDE) // 3, WIDE), 1)
        block = tl.minimum(block, whole)
        within = i - block * 3 * WIDE
        lane, k = within % lanes, within // lanes
        word = i * 0
        for j in tl.static_range(4):
            word |= tl.load(groups + block * 4 * WIDE + j * lanes + lane, there & (kind == 1), 0).to(
                tl.int32
            ) << (6 * j)
        coded = ((word >> (8 * k)) & 255).to(tl.uint8)
    else:
        coded = tl.load(groups + i, there & (kind == 1), 0)
    tl.store(codes + i, tl.where(kind == 2, found, coded), there & (kind != 0))


def _empty(codes: Tensor, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=codes.device)


def owners_of(table: Tensor) -> Tensor:
    """Which group each slot belongs to (uint8), in each plane."""
    ends = table.view(-1, 2, TABLE).sum(1, dtype=torch.int32)
    slots = torch.arange(SLOTS, dtype=torch.int32, device=table.device).repeat(len(ends), 1)
    return torch.searchsorted(ends, slots, right=True).clamp_(max=TABLE - 1).to(torch.uint8)


def encode_codes(codes: Tensor, bits: int, numel: int, message: Tensor) -> Tensor:
    """Write the message of packed codes into `message`, of `entropy.longest`; returns its length (int32)."""
    radix, digits = entropy.GROUPS[bits]
    groups, pieces = entropy.group_count(numel, bits), entropy.piece_count(numel, bits)
    found, table, shares = _empty(codes, TABLE).zero_(), _empty(codes, 2 * TABLE), _empty(codes, 16)
    words = _empty(codes, entropy.PIECE * pieces, dtype=torch.uint16)
    states, counts, length = _empty(codes, pieces * STREAMS), _empty(codes, pieces), _empty(codes)
    size, blocks = codes.numel(), numel // BLOCK
    launch(
        count_kernel, triton.cdiv(groups, SOME), codes, codes, found, groups, size, blocks,
        BITS=bits, SOME=SOME, TABLE=TABLE,
    )  # fmt: skip
    launch(
        shares_kernel, 1, codes, found, shares, table,
        RADIX=radix, DIGITS=digits, TABLE=TABLE, CODES=(1 << bits) - 1,
    )  # fmt: skip
    launch(
        encode_kernel, triton.cdiv(pieces, PIECES), codes, codes, table, words, states, counts, groups,
        pieces, size, blocks, PIECE=entropy.PIECE, PIECES=PIECES, BITS=bits, TABLE=TABLE, num_warps=1,
    )  # fmt: skip
    ends = counts.cumsum(0, dtype=torch.int32)
    head, ahead = entropy.head_bytes(numel, bits), 1 + 2 * ((1 << bits) - 1)
    per = triton.cdiv(max(entropy.PIECE, triton.cdiv(size, pieces)), SIZE)
    launch(
        join_kernel, pieces * per, codes, codes, shares, words, states, counts, ends, message, length, pieces,
        size, head, ahead, PIECE=entropy.PIECE, PER=per, SIZE=SIZE,
    )  # fmt: skip
    return length


def decode_codes(messages: Tensor, lengths: Tensor, bits: int, numel: int, codes: Tensor) -> Tensor:
    """Write the packed codes of each message; returns numbers that are 0 where one is damaged (int32)."""
    radix, digits = entropy.GROUPS[bits]
    groups, pieces = entropy.group_count(numel, bits), entropy.piece_count(numel, bits)
    peers, room = len(messages), messages.stride(0)
    table, counts = _empty(codes, peers, 2 * TABLE), _empty(codes, peers, pieces)
    heads, good = _empty(codes, peers), _empty(codes, peers)
    size, blocks = codes.shape[1], numel // BLOCK
    head, ahead = entropy.head_bytes(numel, bits), 1 + 2 * ((1 << bits) - 1)
    launch(
        read_kernel, peers, codes, messages, lengths, table, counts, heads, good, size, pieces, head, ahead,
        room, RADIX=radix, DIGITS=digits, TABLE=TABLE, CODES=(1 << bits) - 1, PIECES=SIZE,
    )  # fmt: skip
    owners, found = owners_of(table), _empty(codes, peers, groups, dtype=torch.uint8)
    ends = counts.cumsum(1, dtype=torch.int32)
    launch(
        decode_kernel, peers * triton.cdiv(pieces, PIECES), codes, messages, table, owners, counts, ends,
        heads, good, found, groups, pieces, blocks, 1, room, PIECE=entropy.PIECE, PIECES=PIECES, BITS=bits,
        TABLE=TABLE, num_warps=1,
    )  # fmt: skip
    per = triton.cdiv(size, SIZE)
    launch(
        pack_kernel, peers * per, codes, messages, found, good, codes, size, groups, room, per, BITS=bits,
        SIZE=SIZE,
    )  # fmt: skip
    return good
