"""`kernels.mp2_network` by Triton: an element's channels are side by side, and never leave registers."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.reference.mp2_network import EXPONENTIAL, LN2_HIGH, LN2_LOW, LOG2_E
from tacit.kernels.triton.launch import jit, launch
from tacit.kernels.triton.primitives import load, nearest_integer, store

ELEMENTS = 128
"""That one program predicts."""
LOG2E, HIGH, LOW = tl.constexpr(LOG2_E), tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
E0, E1, E2, E3, E4, E5 = (tl.constexpr(each) for each in EXPONENTIAL)


@jit
def sigmoid(x: tensor) -> tensor:
    """1 / (1 + e^-x), of operations that round alike everywhere."""
    x = tl.minimum(tl.maximum(x * -1.0, -80.0), 80.0)
    whole = nearest_integer(x * LOG2E)
    rest = x - whole * HIGH - whole * LOW
    series = ((((E0 * rest + E1) * rest + E2) * rest + E3) * rest + E4) * rest + E5
    power = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.div_rn(1.0, 1.0 + (series * rest * rest + rest + 1.0) * power)


@jit
def sum_of_channels(x: tensor, SIDE: tl.constexpr, HALVINGS: tl.constexpr, N: tl.constexpr) -> tensor:
    """The sum over the first axis, of `SIDE` = 2^HALVINGS channels, in halves."""
    for k in tl.static_range(HALVINGS):
        x = tl.sum(x.reshape(2, SIDE >> (k + 1), N), axis=0)
    return x.reshape(N)


@jit
def neuron(
    weights: tensor, bias: tensor, a: tensor, b: tensor, c: tensor, d: tensor, e: tensor, f: tensor
) -> tensor:
    """ReLU of one row of the first layer."""
    x = tl.load(bias) + tl.load(weights) * a
    x = x + tl.load(weights + 1) * b
    x = x + tl.load(weights + 2) * c
    x = x + tl.load(weights + 3) * d
    x = x + tl.load(weights + 4) * e
    return tl.maximum(x + tl.load(weights + 5) * f, 0.0)


@jit
def predict_kernel(
    changes: tensor, ages: tensor, swings: tensor, packed: tensor, out: tensor,
    numel: tensor, ages_step: tensor, swings_step: tensor, limit: tensor,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, SIDE: tl.constexpr, HALVINGS: tl.constexpr, N: tl.constexpr,
    AGES_VARY: tl.constexpr, SWINGS_VARY: tl.constexpr,
) -> None:  # fmt: skip
    """The next change of N elements."""
    i = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    there = i < numel
    older, newer = load(changes, i, there), load(changes, numel + i, there)
    size = tl.abs(older) * 0.5 + tl.abs(newer) * 0.5
    unit = tl.where(size > 0, size, 1.0)
    older, newer = tl.div_rn(older, unit), tl.div_rn(newer, unit)
    age_at, swing_at = i * AGES_VARY, i * SWINGS_VARY
    first_age = tl.div_rn(1.0, tl.load(ages + age_at, there, 1.0))
    second_age = tl.div_rn(1.0, tl.load(ages + ages_step + age_at, there, 1.0))
    first_swing = tl.load(swings + swing_at, there, 0.0)
    second_swing = tl.load(swings + swings_step + swing_at, there, 0.0)

    bias1 = packed + 12 * WIDTH
    second = bias1 + WIDTH
    bias2 = second + 4 * WIDTH * WIDTH
    squeeze = bias2 + WIDTH
    squeeze_bias = squeeze + HIDDEN * WIDTH
    excite = squeeze_bias + HIDDEN
    excite_bias = excite + WIDTH * HIDDEN
    last = excite_bias + WIDTH
    c = tl.arange(0, SIDE)[:, None]
    known = c < WIDTH
    a = tl.load(bias2 + c, known, 0.0) + tl.zeros((SIDE, N), tl.float32)
    b = a
    for k in tl.static_range(2 * WIDTH):
        x = neuron(
            packed + 6 * k, bias1 + k // 2,
            older, newer, first_age, second_age, first_swing, second_swing,
        )[None, :]  # fmt: skip
        a = a + tl.load(second + 4 * WIDTH * c + k, known, 0.0) * x
        b = b + tl.load(second + 4 * WIDTH * c + 2 * WIDTH + k, known, 0.0) * x
    a, b = tl.maximum(a, 0.0), tl.maximum(b, 0.0)
    mean = (a + b) * 0.5
    gate = tl.load(excite_bias + c, known, 0.0) + tl.zeros((SIDE, N), tl.float32)
    for j in tl.static_range(HIDDEN):
        part = tl.load(squeeze + j * WIDTH + c, known, 0.0) * mean
        narrow = tl.maximum(sum_of_channels(part, SIDE, HALVINGS, N) + tl.load(squeeze_bias + j), 0.0)
        gate = gate + tl.load(excite + c * HIDDEN + j, known, 0.0) * narrow[None, :]
    y = tl.maximum(a, b) * sigmoid(gate)
    part = tl.load(last + c, known, 0.0) * y
    delta = sum_of_channels(part, SIDE, HALVINGS, N) + tl.load(last + WIDTH)
    store(out, i, tl.minimum(tl.maximum(delta, -limit), limit) * size, there)


def predict_changes(
    changes: Tensor, ages: Tensor, log_swings: Tensor, packed: Tensor, width: int, limit: float, out: Tensor
) -> None:
    """See `kernels.mp2_network`."""
    halvings = (width - 1).bit_length()
    ages, log_swings = ages.contiguous(), log_swings.contiguous()
    launch(
        predict_kernel, -(-out.numel() // ELEMENTS), out, changes, ages, log_swings, packed, out,
        out.numel(), ages.shape[1], log_swings.shape[1], limit,
        WIDTH=width, HIDDEN=max(1, width // 4), SIDE=1 << halvings, HALVINGS=halvings, N=ELEMENTS,
        AGES_VARY=int(ages.shape[1] > 1), SWINGS_VARY=int(log_swings.shape[1] > 1),
    )  # fmt: skip
