"""`kernels.mp2_network` in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import conv1d

TAPS, INPUTS = 2, 6
"""The changes that an element shows, and the numbers: both changes, their ages, their layer's sizes."""
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""(e^r - 1 - r) / r^2 up to half of ln 2, the highest power first: the polynomial of Cephes' expf."""


def matrix_of(weight: Tensor) -> Tensor:
    """A convolution over two changes as a matrix: (2 channels out, 2 channels in)."""
    channels, size = weight.shape[1], weight.shape[1] * TAPS
    impulses = torch.eye(size, dtype=torch.float32).view(
        size, channels, TAPS
    )  # its columns answer one impulse each
    return conv1d(impulses, weight, padding=1).flatten(1).t()


def predict_changes(
    changes: Tensor, ages: Tensor, log_swings: Tensor, packed: Tensor, width: int, limit: float, out: Tensor
) -> None:
    """`kernels.mp2_network.predict_changes`, equal to the last bit."""
    first, first_bias, second, second_bias, squeeze, squeeze_bias, excite, excite_bias, last, last_bias = (
        _unpacked(packed, width)
    )
    older, newer = changes.float()
    size = older.abs() * 0.5 + newer.abs() * 0.5
    unit = torch.where(size > 0, size, 1.0)
    inputs = (older / unit, newer / unit, *(1.0 / ages), *log_swings)
    total = second_bias.repeat_interleave(TAPS)[:, None].expand(-1, out.numel())
    for k in range(TAPS * width):
        x = first_bias[k // TAPS]
        for weight, each in zip(first.view(-1, INPUTS)[k], inputs, strict=True):
            x = x + weight * each
        total = total + second.view(TAPS * width, -1)[:, k, None] * x.clamp(min=0)
    older, newer = total.clamp_(min=0).view(width, TAPS, -1).unbind(1)
    mean, gate = (older + newer) * 0.5, excite_bias[:, None]
    for j, bias in enumerate(squeeze_bias):
        narrow = _by_halves(squeeze.view(-1, width)[j, :, None] * mean) + bias
        gate = gate + excite.view(width, -1)[:, j, None] * narrow.clamp(min=0)
    y = torch.maximum(older, newer) * _sigmoid(gate)
    delta = (_by_halves(last[:, None] * y) + last_bias).clamp_(-limit, limit)
    out.copy_(delta * size)


def _unpacked(packed: Tensor, width: int) -> Iterator[Tensor]:
    hidden = max(1, width // 4)
    squares = TAPS * width * TAPS * width
    lengths = [TAPS * width * INPUTS, width, squares, width]
    lengths += [hidden * width, hidden, width * hidden, width, width, 1]
    return iter(torch.split(packed, lengths))


def _by_halves(x: Tensor) -> Tensor:
    """The sum over channels, in halves of a power of two."""
    side = 1 << (x.shape[0] - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, 0, 0, side - x.shape[0]))
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    x = (-x).clamp(-80.0, 80.0)
    whole = (x * LOG2_E).round()
    rest = x - whole * LN2_HIGH - whole * LN2_LOW
    series = torch.full_like(rest, EXPONENTIAL[0])
    for each in EXPONENTIAL[1:]:
        series = series * rest + each
    power = ((whole.to(torch.int32) + 127) << 23).view(torch.float32)
    return 1.0 / (1.0 + (series * rest * rest + rest + 1.0) * power)
