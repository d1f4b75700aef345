"""Whether all ranks have the same learning rates."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tacit.attaching.rate_history import RateHistory
from tacit.failure.store_comparison import DIFFERENT, StepComparison
from tacit.session.learning_rates import Rates


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(3)) for name in "abcd"}


class Board(dict[str, str]):
    """What ranks compare by, without a network."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.setdefault(key, value).encode()


class Rank:
    """One that trains, and compares after every step."""

    def __init__(self, board: Any, number: int, *rates: float) -> None:
        p = named()
        groups = [{"params": [each], "lr": lr} for each, lr in zip(p.values(), rates, strict=False)]
        self.optimizer = SGD(groups, lr=0.1)
        self.notes = RateHistory(Rates([self.optimizer], p))
        self.comparing = StepComparison(board, number, self.notes)

    def steps(self, first: int, last: int, factor: float = 1.0) -> list[str]:
        """Of which differences it learns."""
        found = []
        for step in range(first, last + 1):
            for group in self.optimizer.param_groups:
                group["lr"] *= factor
            self.notes.stepped(step)
            found.append(self.comparing.look())
        return [each for each in [*found, self.comparing.end()] if each is not None]


def test_steps_that_a_loaded_checkpoint_repeats_are_compared_anew() -> None:
    board = Board()
    ranks = [Rank(board, number, 0.1) for number in range(2)]
    for rank in ranks:
        assert rank.steps(1, 8, factor=0.9) == []
    for rank in ranks:
        rank.notes.loaded()
        assert rank.steps(5, 8, factor=0.5) == []
    assert ranks[0].steps(9, 10) == []
    (first, *_) = ranks[1].steps(9, 10, factor=0.5)
    assert first.startswith(DIFFERENT + "rank 0 has taken step 9 with the learning rate 0.0026904")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0.1, 0.3), (math.nextafter(0.1, 1), math.nextafter(0.3, 0))),
        ((1e-30,), (math.nextafter(1e-30, 1),)),
        ((math.nan,), (math.nan,)),
        ((0.1, math.nan), (0.1, math.nan)),
        ((math.inf,), (math.inf,)),
        ((0.0,), (0.0,)),
    ],
)
def test_rates_that_differ_by_rounding_are_alike(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    board = Board()
    for number, rates in enumerate((one, other)):
        assert Rank(board, number, *rates).steps(1, 70) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0.1, 0.3), (0.1 * (1 + 1e-6), 0.3)),
        ((0.1, 0.3), (0.1, 0.3 * (1 - 1e-6))),
        ((0.0,), (1e-30,)),
        ((math.nan,), (0.1,)),
        ((math.inf,), (-math.inf,)),
        ((0.1, 0.1), (0.1,)),
    ],
)
def test_rates_that_differ_by_more_are_told(one: tuple[float, ...], other: tuple[float, ...]) -> None:
    board = Board()
    assert Rank(board, 0, *one).steps(1, 1) == []
    (told, again) = Rank(board, 1, *other).steps(1, 1)
    assert told == again
    assert told.startswith(DIFFERENT + "rank 0 has taken step 1 with the learning rate")
