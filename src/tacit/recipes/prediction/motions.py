"""Recorded elements side by side, and what the closed loop would have made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tacit import checks
from tacit.predictors import Predictor
from tacit.recipes.prediction.layers import Layer

__all__ = ["DEPTH", "Guess", "Motion", "Windows", "elements", "motions", "period_of", "roll_out"]

DEPTH = Predictor.depth

Guess: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Past changes (depth, n) and trends (n,) -> the next change (n,)."""


class Windows(NamedTuple):
    """Stretches of motion: `past` (depth, n), `trend` (n,), and what followed, `true` (n,)."""

    past: Tensor
    trend: Tensor
    true: Tensor


def elements(starts: Tensor, counts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` elements at random, from each layer equally often; `starts` and `counts` as of `Motion`."""
    layer = torch.randint(len(starts), (count,), generator=generator)
    place = torch.rand(count, generator=generator) * counts[layer]
    return starts[layer] + place.long().clamp_(max=counts[layer] - 1)


class Motion(NamedTuple):
    """All elements of some layers of one kind whose records are equally long: T rounds of N elements.

    Attributes:
        changes: shape (T, N); `trends`, (T, N), their layers'; `answers`, (T, N).
        starts: shape (layers,), which element is the first of each; `counts`, how many there are.
    """

    changes: Tensor
    trends: Tensor
    answers: Tensor
    starts: Tensor
    counts: Tensor

    def draw(self, history: Tensor, count: int, generator: torch.Generator) -> Windows:
        """`count` windows at random; each layer is drawn from equally often, and each of its rounds.

        Args:
            history: shape (T, N), what the past is of.
        """
        element = elements(self.starts, self.counts, count, generator)
        at = torch.randint(DEPTH, len(self.changes), (count,), generator=generator)
        past = torch.stack([history[at - DEPTH + i, element] for i in range(DEPTH)])
        return Windows(past, self.trends[at, element], self.changes[at, element])

    def windows(self, history: Tensor) -> Windows:
        """All windows; n is (T - depth) N."""
        rounds = len(self.changes) - DEPTH
        past = torch.stack([history[i : i + rounds].flatten() for i in range(DEPTH)])
        return Windows(past, self.trends[DEPTH:].flatten(), self.changes[DEPTH:].flatten())


def motions(layers: Sequence[Layer], kind: str | None = None) -> list[Motion]:
    """The layers of this kind (None: of any), joined where equally long; what never moves is left out.

    Records that are too short for one window are left out, too.
    """
    by_rounds: dict[int, list[Layer]] = {}
    for layer in layers:
        if (kind is None or layer.kind == kind) and len(layer.changes) > DEPTH and _moves(layer):
            by_rounds.setdefault(len(layer.changes), []).append(layer)
    return [_joined(group) for group in by_rounds.values()]


def _moves(layer: Layer) -> bool:
    return bool(layer.changes[:-1].any())


def _joined(layers: Sequence[Layer]) -> Motion:
    counts = torch.tensor([layer.changes.shape[1] for layer in layers])
    return Motion(
        torch.cat([layer.changes for layer in layers], 1),
        torch.cat([layer.trends.unsqueeze(1).expand_as(layer.changes) for layer in layers], 1),
        torch.cat([layer.answers for layer in layers], 1),
        counts.cumsum(0) - counts,
        counts,
    )


def period_of(share: float) -> int:
    """In how many rounds each element is sent once, where in each a share of them is.

    Raises:
        ConfigError: it is no share.
    """
    checks.real("share", share, "0.11 is usual, each element in every ninth round", above=0, most=1)
    return max(1, round(1 / share))


def roll_out(guess: Guess, motion: Motion, period: int, seed: int = 0) -> Tensor:
    """What the closed loop would have answered along this very motion, shape (T, N).

    The first `DEPTH` rounds are pushed in full. From then on each element is sent in one round of `period`,
    beginning at a random one; in the others it is predicted, from what was answered before, be it sent or
    predicted. As in `compressors.Predicted`, what is not sent is lost: no later round makes up for it.

    The motion does not react to the predictions, as it would in a training; a recording made with a predictor
    in the loop does (`Layer.answers`).
    """
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randint(period, motion.changes.shape[1:], generator=generator)
    answers = motion.changes.clone()
    for t in range(DEPTH, len(answers)):
        predicted = guess(answers[t - DEPTH : t], motion.trends[t])
        torch.where((turn + t) % period == 0, motion.changes[t], predicted, out=answers[t])
    return answers
