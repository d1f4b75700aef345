"""Select the k entries of largest magnitude: exactly k of them, at little more than one pass over memory.

A threshold from a sample lets through a little more than k candidates; the exact choice is made among them.
Set by set this is `torch.topk`, at a fraction of its time.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements that the plain torch version works on at a time: 1 MiB of fp32, within a second-level cache."""
SAMPLE = 1 << 16
"""Elements looked at to guess the threshold. Fewer make the guess miss at small ratios."""


@cache
def path() -> str:
    """Which version is at work: "numba", or "torch" where numba is not installed."""
    return "numba" if find_spec("numba") else "torch"


def select_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` entries of largest magnitude of the flat tensor `x`.

    Returns:
        (index, values): int32 positions in no promised order, and the entries there. A NaN may or may not be
        chosen.
    """
    if x.is_meta:
        return x.new_empty(k, dtype=torch.int32), x.new_empty(k)
    index = _exact(x, k) if 4 * k >= x.numel() or x.numel() <= 2 * SAMPLE else _by_threshold(x, k)
    return index.to(torch.int32), x[index]


def _exact(x: Tensor, k: int) -> Tensor:
    return torch.topk(x.abs(), k, sorted=False).indices


def _by_threshold(x: Tensor, k: int) -> Tensor:
    found = at_least(x, _guess(x, k), 2 * k + 1024)
    if found is None or found.numel() < k:  # the sample misled: far too many, or too few
        return _exact(x, k)
    return found[torch.topk(x[found].abs(), k, sorted=False).indices]


def _guess(x: Tensor, k: int) -> float:
    """A threshold that about k + 5 % + 4 sigma entries reach."""
    stride = (x.numel() // SAMPLE) | 1  # odd, so that it does not march in step with the rows of a matrix
    sample = x[::stride].abs()
    expected = k * sample.numel() / x.numel()
    wanted = math.ceil(1.05 * expected + 4 * math.sqrt(expected))
    return float(torch.topk(sample, min(wanted, sample.numel()), sorted=True).values[-1])


def at_least(x: Tensor, threshold: float, room: int) -> Tensor | None:
    """The positions where |x| >= threshold, rising; None where there are more than `room`."""
    if path() == "numba" and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _at_least_numba(x, threshold, room)
    return at_least_torch(x, threshold, room)


def _at_least_numba(x: Tensor, threshold: float, room: int) -> Tensor | None:
    from tacit.kernels.scan import WIDTH, positions

    out = torch.empty(room + WIDTH, dtype=torch.int32)
    array = x.detach().numpy()
    count = positions(array, array.dtype.type(threshold), out.numpy())
    return None if count < 0 else out[:count]


def at_least_torch(x: Tensor, threshold: float, room: int) -> Tensor | None:
    """The reference: `at_least` in plain torch, in blocks that stay in the cache."""
    block = torch.empty(min(BLOCK, x.numel()), dtype=x.dtype, device=x.device)
    mask = torch.empty(block.numel(), dtype=torch.bool, device=x.device)
    found = []
    for start in range(0, x.numel(), BLOCK):
        piece = x[start : start + BLOCK]
        n = piece.numel()
        torch.abs(piece, out=block[:n])
        torch.ge(block[:n], threshold, out=mask[:n])
        found.append(mask[:n].nonzero().view(-1).add_(start))
    index = torch.cat(found)
    return index if index.numel() <= room else None
