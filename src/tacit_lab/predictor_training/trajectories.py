"""Recorded elements side by side, and what of their past is known where only a share of them is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tacit import checks
from tacit.prediction.predictor import Seen
from tacit_lab.predictor_training.layers import Layer

Guess: TypeAlias = Callable[[Seen], Tensor]
"""What is known of n elements -> their next changes (n,)."""


class Windows(NamedTuple):
    """What was known of n elements, and what they did then, `true` (n,)."""

    seen: Seen
    true: Tensor


def elements(starts: Tensor, counts: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` elements at random, from each layer equally often; `starts` and `counts` as of `Motion`."""
    layer = torch.randint(len(starts), (count,), generator=generator)
    place = torch.rand(count, generator=generator) * counts[layer]
    return starts[layer] + place.long().clamp_(max=counts[layer] - 1)


def reach(share: float) -> int:
    """How many rounds back the second to last change lies that was heard of an element, at most.

    Raises:
        ConfigError: it is no share.
    """
    checks.real("share", share, "0.4 is usual, each element in every second or third round", above=0, most=1)
    return 2 * math.ceil(1 / share)


def when(share: float, count: int, generator: torch.Generator) -> Tensor:
    """How many rounds ago each of `count` elements to be predicted was last received, shape (2, count).

    A share of the elements takes turns: of spans of 1 / share elements, on average, one after the other is
    sent. If all are sent, both changes are those of the last rounds.
    """
    least, rest = divmod(1 / share, 1)
    if share == 1:
        return torch.tensor([[2], [1]]).expand(2, count)
    longer, shorter = rest * least, (1 - rest) * (least - 1)  # elements whose turn it is not
    size = least + (torch.rand(count, generator=generator) < longer / (longer + shorter))
    age = 1 + (torch.rand(count, generator=generator) * (size - 1)).long()
    return torch.stack((age + size.long(), age))


class Motion(NamedTuple):
    """All elements of some layers of one kind whose records are equally long: T rounds of N elements.

    Attributes:
        changes: shape (T, N); `swings`, (T, N), their layers'.
        starts: shape (layers,), which element is the first of each; `counts`, how many there are.
    """

    changes: Tensor
    swings: Tensor
    starts: Tensor
    counts: Tensor

    def seen(self, round_: int | Tensor, ages: Tensor, element: Tensor) -> Seen:
        """What is known before a round of elements that were heard of so many rounds ago, (k, n)."""
        at = round_ - ages
        then, now = self.swings[at, element], self.swings[round_, element]
        known = (then > 0) & (now > 0)
        swings = torch.where(known, now / torch.where(known, then, 1.0), 1.0)
        return Seen(self.changes[at, element], ages.float(), swings)

    def draw(self, share: float, count: int, generator: torch.Generator) -> Windows:
        """`count` windows at random; each layer is drawn from equally often, and each of its rounds.

        Args:
            share: how many of the elements are sent in a round; see `when`.
        """
        element = elements(self.starts, self.counts, count, generator)
        at = torch.randint(reach(share), len(self.changes), (count,), generator=generator)
        seen = self.seen(at, when(share, count, generator), element)
        return Windows(seen, self.changes[at, element])

    def windows(self, share: float) -> Windows:
        """One of each element and round; n is (T - reach) N."""
        first, (rounds, count) = reach(share), self.changes.shape
        at = torch.arange(first, rounds).repeat_interleave(count)
        element = torch.arange(count).repeat(rounds - first)
        ages = when(share, len(at), torch.Generator().manual_seed(0))
        return Windows(self.seen(at, ages, element), self.changes[at, element])


def motions(layers: Sequence[Layer], kind: str | None = None, share: float = 1.0) -> list[Motion]:
    """The layers of this kind (None: of any), joined where equally long; what never moves is left out.

    Records that are too short for one window are left out, too.
    """
    by_rounds: dict[int, list[Layer]] = {}
    for layer in layers:
        long = len(layer.changes) > reach(share)
        if (kind is None or layer.kind == kind) and long and _moves(layer):
            by_rounds.setdefault(len(layer.changes), []).append(layer)
    return [_joined(group) for group in by_rounds.values()]


def _moves(layer: Layer) -> bool:
    return bool(layer.changes[:-1].any())


def _joined(layers: Sequence[Layer]) -> Motion:
    counts = torch.tensor([layer.changes.shape[1] for layer in layers])
    return Motion(
        torch.cat([layer.changes for layer in layers], 1),
        torch.cat([layer.swings.unsqueeze(1).expand_as(layer.changes) for layer in layers], 1),
        counts.cumsum(0) - counts,
        counts,
    )


def period_of(share: float) -> int:
    """In how many rounds each element is sent once, where in each a share of them is.

    Raises:
        ConfigError: it is no share.
    """
    reach(share)
    return max(1, round(1 / share))


def roll_out(guess: Guess, motion: Motion, period: int, seed: int = 0) -> Tensor:
    """What would have been answered along this very motion, shape (T, N).

    The first two periods are pushed in full. From then on each element is sent in one round of `period`,
    beginning at a random one; in the others it is predicted from its received changes.

    The motion does not react to the predictions, as it would in a training.
    """
    generator = torch.Generator().manual_seed(seed)
    turn = torch.randint(period, motion.changes.shape[1:], generator=generator)
    element = torch.arange(motion.changes.shape[1])
    answers = motion.changes.clone()
    for t in range(2 * period, len(answers)):
        age = (turn + t) % period
        ages = torch.stack((age + period, age)).clamp(min=1)
        predicted = guess(motion.seen(t, ages, element))
        torch.where(age == 0, motion.changes[t], predicted, out=answers[t])
    return answers
