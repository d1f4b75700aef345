"""`kernels.entropy` by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.vectors import LANES, byte_vector, load_bytes, store

SCALE_BITS, STREAMS, COLUMNS = 15, 8, 4
SLOTS = 1 << SCALE_BITS
LOWEST = np.uint64(1 << 16)


def _split(codes: Any, groups: Any) -> None:
    """Pairs of codes of 3 bits: four from three bytes, lane by lane."""
    two, four, six = byte_vector(np.uint8(2)), byte_vector(np.uint8(4)), byte_vector(np.uint8(6))
    low = byte_vector(np.uint8(63))
    whole = codes.shape[0] // (3 * LANES)
    for block in range(whole):
        at, to = codes.ctypes.data + block * 3 * LANES, groups.ctypes.data + block * 4 * LANES
        a, b, c = load_bytes(at), load_bytes(at + LANES), load_bytes(at + 2 * LANES)
        store(to, a & low)
        store(to + LANES, ((a >> six) | (b << two)) & low)
        store(to + 2 * LANES, ((b >> four) | (c << four)) & low)
        store(to + 3 * LANES, c >> two)
    codes, groups = codes[whole * 3 * LANES :], groups[whole * 4 * LANES :]
    lanes = codes.shape[0] // 3
    for i in range(lanes):
        word = codes[i] | (codes[lanes + i] << 8) | (codes[2 * lanes + i] << 16)
        for j in range(4):
            groups[j * lanes + i] = (word >> (6 * j)) & 63


def _join(groups: Any, codes: Any) -> None:
    """`_split`, back."""
    two, four, six = byte_vector(np.uint8(2)), byte_vector(np.uint8(4)), byte_vector(np.uint8(6))
    whole = codes.shape[0] // (3 * LANES)
    for block in range(whole):
        at, to = groups.ctypes.data + block * 4 * LANES, codes.ctypes.data + block * 3 * LANES
        p, q = load_bytes(at), load_bytes(at + LANES)
        r, s = load_bytes(at + 2 * LANES), load_bytes(at + 3 * LANES)
        store(to, p | (q << six))
        store(to + LANES, (q >> two) | (r << four))
        store(to + 2 * LANES, (r >> four) | (s << two))
    codes, groups = codes[whole * 3 * LANES :], groups[whole * 4 * LANES :]
    lanes = codes.shape[0] // 3
    for i in range(lanes):
        word = np.int64(0)
        for j in range(4):
            word |= np.int64(groups[j * lanes + i]) << (6 * j)
        for k in range(3):
            codes[k * lanes + i] = (word >> (8 * k)) & 255


def _count(groups: Any, counts: Any) -> None:
    """How often each group occurs; in four columns, so that equal neighbours do not wait for each other."""
    n = groups.shape[0]
    for i in range(0, n - 3, 4):
        for j in range(COLUMNS):
            counts[j, groups[i + j]] += 1
    for i in range(n - n % 4, n):
        counts[0, groups[i]] += 1


def _divisors(freqs: Any) -> Any:
    """A row a group: from where a state gives up a word; how to divide by the frequency; what to add.

    x // f is ((x * row[1] >> 32) + x) >> row[2] for all x of 32 bits (Granlund & Montgomery, PLDI 1994).
    """
    table = np.zeros((freqs.shape[0], 4), np.uint64)
    start = np.uint64(0)
    for s in range(freqs.shape[0]):
        f = np.uint64(freqs[s])
        if f:
            shift = np.uint64(0)
            while (np.uint64(1) << shift) < f:
                shift += np.uint64(1)
            table[s, 0] = f << np.uint64(32 - SCALE_BITS)
            table[s, 1] = (((np.uint64(1) << shift) - f) << np.uint64(32)) // f + np.uint64(1)
            table[s, 2] = shift
            table[s, 3] = (start << np.uint64(32)) | (np.uint64(SLOTS) - f)
            start += f
    return table


def _pushed(x: Any, row: Any, words: Any, at: Any) -> Any:
    """The state after one more group, and where words begin; no branch, as it would be guessed wrongly."""
    full = np.uint64(x >= row[0])
    words[at - np.uint64(1)] = np.uint16(x & np.uint64(0xFFFF))
    x >>= full << np.uint64(4)
    q = (((x * row[1]) >> np.uint64(32)) + x) >> row[2]
    return x + (row[3] >> np.uint64(32)) + q * (row[3] & np.uint64(0xFFFFFFFF)), at - full


def _encode(groups: Any, piece: Any, freqs: Any, states: Any, words: Any, counts: Any) -> None:
    """Write each piece's states in the end, how many words it takes, and these, up to the end of `words`.

    `piece`: so many groups are a piece. `words` has one element more than there are groups.
    """
    table = divisors(freqs)
    x = np.empty(STREAMS, np.uint64)
    at = np.uint64(words.shape[0])
    for back_piece in range(states.shape[0]):
        p = states.shape[0] - 1 - back_piece
        part, before = groups[p * piece : (p + 1) * piece], at
        x[:] = LOWEST
        n = part.shape[0]
        whole = n - n % STREAMS
        for back in range(n - whole):
            i = n - 1 - back
            x[i - whole], at = pushed(x[i - whole], table[part[i]], words, at)
        for first in range(whole - STREAMS, -1, -STREAMS):
            for back in range(STREAMS):
                j = STREAMS - 1 - back
                x[j], at = pushed(x[j], table[part[first + j]], words, at)
        for j in range(STREAMS):
            states[p, j] = np.uint32(x[j])
        counts[p] = np.int64(before - at)


def _decode(freqs: Any, piece: Any, states: Any, counts: Any, words: Any, groups: Any) -> bool:
    """Write the groups; whether all words were used, and the states are those of the beginning."""
    owner = np.empty(SLOTS, np.uint8)
    table = np.zeros((freqs.shape[0], 2), np.uint64)
    slot = 0
    for s in range(freqs.shape[0]):
        table[s, 0] = np.uint64(freqs[s])
        table[s, 1] = np.uint64(slot)
        owner[slot : slot + freqs[s]] = s
        slot += freqs[s]
    x = np.empty(STREAMS, np.uint64)
    at, used = 0, 0
    for p in range(states.shape[0]):
        part = groups[p * piece : (p + 1) * piece]
        for j in range(STREAMS):
            x[j] = np.uint64(states[p, j])
        n, used = part.shape[0], used + counts[p]
        first = 0
        while first + STREAMS <= n and at + STREAMS <= used:
            for j in range(STREAMS):
                s, y = popped(x[j], owner, table)
                part[first + j] = s
                low = np.uint64(y < LOWEST)
                x[j] = (y << (low << np.uint64(4))) | (np.uint64(words[at]) & (np.uint64(0) - low))
                at += int(low)
            first += STREAMS
        for i in range(first, n):
            s, y = popped(x[i & (STREAMS - 1)], owner, table)
            part[i] = s
            if y < LOWEST:
                if at >= used:
                    return False
                y = (y << np.uint64(16)) | np.uint64(words[at])
                at += 1
            x[i & (STREAMS - 1)] = y
        good = at == used
        for j in range(STREAMS):
            good = good and x[j] == LOWEST
        if not good:
            return False
    return True


def _popped(x: Any, owner: Any, table: Any) -> Any:
    """The group that a state ends with, and the state before it, which may lack a word."""
    slot = x & np.uint64(SLOTS - 1)
    s = owner[slot]
    return s, table[s, 0] * (x >> np.uint64(SCALE_BITS)) + slot - table[s, 1]


divisors, pushed, popped = inline(_divisors), inline(_pushed), inline(_popped)
_BYTES, _WORDS, _STATES = "uint8[::1]", "uint16[::1]", "uint32[::1]"
split = compile_now(_split, [f"void({_BYTES}, {_BYTES})"])
join = compile_now(_join, [f"void({_BYTES}, {_BYTES})"])
count = compile_now(_count, [f"void({_BYTES}, int64[:,::1])"])
_ROWS, _COUNTS = "uint32[:,::1]", "int64[::1]"
encode = compile_now(_encode, [f"void({_BYTES}, int64, {_STATES}, {_ROWS}, {_WORDS}, {_COUNTS})"])
decode = compile_now(_decode, [f"boolean({_STATES}, int64, {_ROWS}, {_COUNTS}, {_WORDS}, {_BYTES})"])
