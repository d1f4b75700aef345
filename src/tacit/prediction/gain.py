"""A factor for each layer's predictions, from their errors on entries that were sent."""

from __future__ import annotations

import torch
from torch import Tensor

SUMS = 4
"""For each parameter: sums of guess x truth, guess^2 and truth^2, and the number of entries."""
KEPT = 0.9
"""The factor on earlier sums in each round."""
STEPS = 64
"""Gains are multiples of 1 / 64, so that the last bits of a sum, which depend on the processor, are lost."""


def judged(sums: Tensor, owner: Tensor, guess: Tensor, true: Tensor) -> Tensor:
    """The sums (parameters, 4) after a round; unchanged for parameters without drawn entries.

    A round counts as much as its entries are many, however far the parameters move in it: so a gain measured
    at one learning rate holds at the next.

    Args:
        owner: the parameter of each guess; `true`, the received changes.
    """
    guess, true = (each.double().nan_to_num() for each in (guess, true))
    if not len(guess):
        return sums.clone()
    unit = torch.maximum(guess.abs().amax(), true.abs().amax()).clamp(min=torch.finfo(torch.float32).tiny)
    guess, true = guess / unit, true / unit
    now = torch.zeros_like(sums)
    now.index_add_(
        0, owner, torch.stack((guess * true, guess * guess, true * true, torch.ones_like(true)), 1)
    )
    size = now[:, 1] + now[:, 2]
    moved = (size > 0).unsqueeze(1)
    now[:, :3] *= (now[:, 3] / torch.where(size > 0, size, 1.0)).unsqueeze(1)
    return torch.where(moved, KEPT * sums + now, sums)


def gains(sums: Tensor) -> list[float]:
    """The factor on each parameter's predictions, from 0 to 1.

    It is the least-squares factor from guesses to truths, sum(guess true) / sum(guess^2), less its
    standard error: a prediction that is unrelated to the truth gets a factor of about 0.
    """
    products, guesses, truths, count = sums.double().unbind(1)
    known = (guesses > 0) & (count > 2)
    guesses = torch.where(known, guesses, 1.0)
    factor = products / guesses
    rest = (truths - products * factor).clamp(min=0)
    error = (rest / guesses / (count - 1).clamp(min=1)).sqrt()
    gain = torch.where(known, factor - error, 0.0).clamp(0.0, 1.0)
    steps: list[float] = (gain * STEPS).round().div(STEPS).tolist()
    return steps
