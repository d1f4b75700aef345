"""`kernels.levels` by Triton: quantize and pack; unpacks and adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.payload_layout import codes_per_group
from tacit.kernels.triton.launch import jit, launch_by_rows, payload_stacks, philox_keys
from tacit.kernels.triton.primitives import (
    cap,
    codes_of,
    largest_magnitude,
    level_of,
    load,
    random_uint16,
    round_to,
    safe_inverse,
    store,
    sum_by_halves,
)

STEP, OFFSET = tl.constexpr(2.0**-16), tl.constexpr(2.0**-17)


@jit
def scale(
    x: tensor, begin: tensor, there: tensor, size: tensor, clip: tensor, most: tensor,
    ROWS: tl.constexpr, LANES: tl.constexpr, HALVINGS: tl.constexpr, NORM: tl.constexpr,
) -> tensor:  # fmt: skip
    """The value of the top level, by the sum of squares; see `levels.quantize`."""
    i, inverse = tl.arange(0, LANES)[None, :], safe_inverse(most)[:, None]
    partial = tl.zeros((ROWS, LANES), tl.float32)
    for j in tl.static_range(8):
        y = load(x, begin + j * LANES + i, there & (j * LANES + i < size)) * inverse
        partial += y * y
    total = sum_by_halves(partial, HALVINGS)
    if NORM:
        return cap(most * tl.sqrt_rn(total))
    share = clip * tl.sqrt_rn(tl.div_rn(total, tl.cast(size, tl.float32)))
    return most * tl.where(share < 1.0, share, 1.0)  # so with NaN all of it


@jit
def quantize_kernel(
    x: tensor, codes: tensor, units: tensor, clip: tensor, key0: tensor, key1: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BUCKET: tl.constexpr, HALVINGS: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WORD: tl.constexpr, LARGEST: tl.constexpr, NORM: tl.constexpr,
) -> None:  # fmt: skip
    """A unit for each bucket; then codes, packed lane by lane."""
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    wide = row.to(tl.int64)[:, None]
    begin, all_of = wide * BUCKET, tl.arange(0, BUCKET)[None, :]
    most = largest_magnitude(load(x, begin + all_of, there & (all_of < size)))
    if not LARGEST:
        most = scale(x, begin, there, size, clip, most, ROWS, BUCKET // 8, HALVINGS, NORM)
    unit = tl.div_rn(most, 1.0 * top)
    inverse = safe_inverse(unit)
    tl.store(units + row, tl.where(inverse > 0, unit, 0.0), row < first + count)
    i = tl.arange(0, BUCKET // GROUP)[None, :]
    word = tl.zeros((ROWS, BUCKET // GROUP), WORD)
    for j in tl.static_range(GROUP):
        place = j * lanes + i
        mask = there & (i < lanes) & (place < size)
        random = random_uint16(key0, key1, wide * (BUCKET // 8), (size + 7) >> 3, place)
        u = random.to(tl.float32) * STEP + (OFFSET + top)  # exact: 24 bits at the most
        level = load(x, begin + place, mask) * inverse[:, None] + u
        code = tl.minimum(tl.maximum(level, 0.0), 2.0 * top).to(tl.int32)
        word |= tl.where(mask, code, 0).to(WORD) << (BITS * j)
    for k in tl.static_range(BITS * GROUP // 8):
        at = wide * (BUCKET // 8 * BITS) + k * lanes + i
        tl.store(codes + at, (word >> (8 * k)) & 255, there & (i < lanes))


@jit
def add_kernel(
    codes: tensor, units: tensor, out: tensor, codes_step: tensor, units_step: tensor, peers: tensor,
    weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BUCKET: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORD: tl.constexpr,
    FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order; sums stay in registers."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = (row < first + count)[:, None, None], row.to(tl.int64)[:, None, None]
    j, i = tl.arange(0, GROUP)[None, :, None], tl.arange(0, BUCKET // GROUP)[None, None, :]
    lane, place = there & (i < lanes), j * lanes + i
    mask = lane & (place < size)
    total = tl.zeros((ROWS, GROUP, BUCKET // GROUP), tl.float32)
    if not FRESH:
        total = load(out, wide * BUCKET + place, mask)
    codes += wide * (BUCKET // 8 * BITS) + i
    units += wide
    for _ in range(peers):
        level = level_of(codes_of(codes, lanes, lane, j, BITS, GROUP, WORD), BITS)
        unit = round_to(round_to(tl.load(units, there, 0.0), out) * weight, out)
        total = round_to(total + round_to(unit * level, out), out)
        codes += codes_step
        units += units_step
    store(out, wide * BUCKET + place, total, mask)


def _word(bits: int) -> Any:
    """The type that holds the codes of a lane."""
    return tl.int32 if bits * codes_per_group(bits) <= 32 else tl.int64


def quantize(x: Tensor, bits: int, bucket: int, clip: float, seed: int, codes: Tensor, units: Tensor) -> None:
    """See `kernels.levels`."""
    group = codes_per_group(bits)
    launch_by_rows(
        quantize_kernel, x, bucket, group, x, codes, units, clip, *philox_keys(seed),
        BUCKET=bucket, HALVINGS=bucket.bit_length() - 4, BITS=bits, GROUP=group, WORD=_word(bits),
        LARGEST=clip == 0, NORM=clip < 0, rows=max(1, min(8, 2048 // bucket)),
    )  # fmt: skip


def add_levels_(
    payloads: Sequence[Sequence[Tensor]], bits: int, bucket: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.levels`."""
    group = codes_per_group(bits)
    for stack in payload_stacks(payloads):
        launch_by_rows(
            add_kernel, out, bucket, group, *stack.first, out, *stack.strides, stack.peers, weight,
            BUCKET=bucket, BITS=bits, GROUP=group, WORD=_word(bits), FRESH=fresh,
            rows=max(1, min(8, 2048 // bucket)),
        )  # fmt: skip
        fresh = False
