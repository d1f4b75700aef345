"""`kernels.blockwise` by Triton: levels, packed, and the residual; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.payload_layout import BLOCK, TRITS, block_bytes, codes_per_group
from tacit.kernels.triton.launch import jit, launch_by_rows, payload_stacks
from tacit.kernels.triton.primitives import (
    codes_of,
    largest_magnitude,
    level_of,
    load,
    load_sum,
    nearest_integer,
    round_to,
    safe_inverse,
    store,
)

ROWS_AT_A_TIME = 4
LARGEST_BF16 = tl.constexpr(2.0**127 * (2 - 2.0**-7))


@jit
def encode_kernel(
    x: tensor, residual: tensor, new_residual: tensor, codes: tensor, units: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    BYTES: tl.constexpr, WORD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
) -> None:  # fmt: skip
    """A unit for each block; then the nearest levels, packed lane by lane, and what they leave out."""
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < first + count)[:, None]
    wide = row.to(tl.int64)[:, None]
    begin, all_of = wide * BLOCK, tl.arange(0, BLOCK)[None, :]
    most = largest_magnitude(load_sum(x, residual, begin + all_of, there & (all_of < size), HAS_RESIDUAL))
    unit = tl.div_rn(tl.where(most > LARGEST_BF16, LARGEST_BF16, most), 1.0 * top)
    bits = (unit.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    unit = bits.to(tl.float32, bitcast=True)
    inverse = safe_inverse(unit)
    unit = tl.where(inverse > 0, unit, 0.0)
    tl.store(units + row, (unit.to(tl.int32, bitcast=True) >> 16).to(tl.int16), row < first + count)
    i = tl.arange(0, WIDE)[None, :]
    word = tl.zeros((ROWS, WIDE), WORD)
    for j in tl.static_range(GROUP):
        place = j * lanes + i
        mask = there & (i < lanes) & (place < size)
        a = load_sum(x, residual, begin + place, mask, HAS_RESIDUAL)
        level = tl.minimum(tl.maximum(a * inverse[:, None], -1.0 * top), 1.0 * top)
        level = nearest_integer(level)
        code = tl.where(mask, level.to(tl.int32) + top, 0).to(WORD)
        word += code * 3**j if BITS == 2 else code << (BITS * j)
        if HAS_RESIDUAL:
            store(new_residual, begin + place, a - round_to(round_to(unit, x)[:, None] * level, x), mask)
    for k in tl.static_range(1 if BITS == 2 else BITS * GROUP // 8):
        tl.store(codes + wide * BYTES + k * lanes + i, (word >> (8 * k)) & 255, there & (i < lanes))


@jit
def add_kernel(
    codes: tensor, units: tensor, out: tensor, codes_step: tensor, units_step: tensor, peers: tensor,
    weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    BYTES: tl.constexpr, WORD: tl.constexpr, DEEP: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order; sums stay in registers."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = (row < first + count)[:, None, None], row.to(tl.int64)[:, None, None]
    j, i = tl.arange(0, DEEP)[None, :, None], tl.arange(0, WIDE)[None, None, :]
    lane, place = there & (i < lanes), j * lanes + i
    mask = lane & (j < GROUP) & (place < size)
    total = tl.zeros((ROWS, DEEP, WIDE), tl.float32)
    if not FRESH:
        total = load(out, wide * BLOCK + place, mask)
    codes += wide * BYTES + i
    units += wide
    for _ in range(peers):
        level = level_of(codes_of(codes, lanes, lane, j, BITS, GROUP, WORD), BITS)
        unit = round_to(round_to(load(units, wide * 0, there), out) * weight, out)
        total = round_to(total + round_to(unit * level, out), out)
        codes += codes_step
        units += units_step
    store(out, wide * BLOCK + place, total, mask)


def _packing(bits: int) -> dict[str, Any]:
    group = TRITS if bits == 2 else codes_per_group(bits)
    wide = 1 << (-(-BLOCK // group) - 1).bit_length()
    word = tl.int32 if bits * group <= 32 else tl.int64
    sizes = {"BLOCK": BLOCK, "BITS": bits, "GROUP": group, "WIDE": wide, "BYTES": block_bytes(BLOCK, bits)}
    return sizes | {"WORD": word}


def encode_blocks(
    x: Tensor, bits: int, codes: Tensor, units: Tensor, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> None:  # fmt: skip
    """See `kernels.blockwise`."""
    packing, has_residual = _packing(bits), residual is not None and new_residual is not None
    before, after = (residual, new_residual) if has_residual else (x, x)
    launch_by_rows(
        encode_kernel, x, BLOCK, packing["GROUP"], x, before, after, codes, units, **packing,
        HAS_RESIDUAL=has_residual, rows=ROWS_AT_A_TIME,
    )  # fmt: skip


def add_blocks_(
    payloads: Sequence[Sequence[Tensor]], bits: int, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.blockwise`."""
    packing = _packing(bits)
    for stack in payload_stacks(payloads):
        launch_by_rows(
            add_kernel, out, BLOCK, packing["GROUP"], *stack.first, out, *stack.strides, stack.peers, weight,
            **packing, DEEP=triton.next_power_of_2(packing["GROUP"]), FRESH=fresh, rows=ROWS_AT_A_TIME,
        )  # fmt: skip
        fresh = False
