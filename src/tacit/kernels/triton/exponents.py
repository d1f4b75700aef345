"""`kernels.exponents` by Triton: round to powers of two at random; adds any number of peers in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.triton.launch import jit, launch_by_rows, payload_stacks, philox_keys
from tacit.kernels.triton.primitives import MAGNITUDE, load, negate, random_uint16, round_to, store

BLOCK = 512
LANES = tl.constexpr(BLOCK // 8)


@jit
def encode_kernel(
    x: tensor, exponents: tensor, bits: tensor, key0: tensor, key1: tensor,
    first: tensor, count: tensor, size: tensor, lanes: tensor, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Add random bits below the exponent, and keep what carries into it."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, LANES)[None, :]
    there = (row < first + count)[:, None] & (i < lanes)
    byte = tl.zeros((ROWS, LANES), tl.int32)
    for j in tl.static_range(8):
        place = j * lanes + i
        mask = there & (place < size)
        a = load(x, wide * (8 * LANES) + place, mask)
        pattern = (a.to(tl.int32, bitcast=True) & MAGNITUDE).to(tl.uint32)
        random = random_uint16(key0, key1, wide * LANES, lanes, place)
        carried = pattern + (random << 7).to(tl.uint32) + 64
        exponent = tl.minimum((carried >> 23).to(tl.int32), 254)
        tl.store(exponents + wide * (8 * LANES) + place, exponent, mask)
        byte |= ((a >= 0) & mask).to(tl.int32) << j
    tl.store(bits + wide * LANES + i, byte, there)


@jit
def add_kernel(
    exponents: tensor, bits: tensor, out: tensor, exponents_step: tensor, bits_step: tensor,
    peers: tensor, weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide, i = row.to(tl.int64)[:, None], tl.arange(0, LANES)[None, :]
    for j in tl.static_range(8):
        mask = (row < first + count)[:, None] & (i < lanes) & (j * lanes + i < size)
        at = wide * (8 * LANES) + j * lanes + i
        total = tl.zeros((ROWS, LANES), tl.float32)
        if not FRESH:
            total = load(out, at, mask)
        exponents_at, bits_at = exponents, bits
        for _ in range(peers):
            value = (tl.load(exponents_at + at, mask, 0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            byte = tl.load(bits_at + wide * LANES + i, mask, 0).to(tl.int32)
            value = round_to(value, out)
            decoded = round_to(weight * tl.where(((byte >> j) & 1) != 0, value, negate(value)), out)
            total = round_to(total + decoded, out)
            exponents_at += exponents_step
            bits_at += bits_step
        store(out, at, total, mask)


def encode_exponents(x: Tensor, seed: int, exponents: Tensor, bits: Tensor) -> None:
    """See `kernels.exponents`."""
    launch_by_rows(encode_kernel, x, BLOCK, 8, x, exponents, bits, *philox_keys(seed))


def add_exponents_(payloads: Sequence[Sequence[Tensor]], weight: float, out: Tensor, fresh: bool) -> None:
    """See `kernels.exponents`."""
    for stack in payload_stacks(payloads):
        launch_by_rows(
            add_kernel, out, BLOCK, 8, *stack.first, out, *stack.strides, stack.peers, weight, FRESH=fresh
        )
        fresh = False
