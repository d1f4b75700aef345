"""The learning rate of each parameter, and whether all ranks have the same."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from tacit.attaching.rate_history import RateHistory
from tacit.failure.store_comparison import DIFFERENT, StepComparison
from tacit.session.learning_rates import Rates


def named() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.zeros(3)) for name in "abcd"}


def test_each_parameter_has_the_rate_of_its_group_now() -> None:
    p = named()
    optimizer = SGD([{"params": [p["a"]]}, {"params": [p["b"], p["c"]], "lr": 0.5}], lr=0.1)
    rates = Rates([optimizer], p)
    assert rates() == {"a": 0.1, "b": 0.5, "c": 0.5, "d": 0.0}
    assert max(rates().values()) == 0.5
    StepLR(optimizer, 1, gamma=0.1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    assert rates() == {"a": 0.1 * 0.1, "b": 0.5 * 0.1, "c": 0.5 * 0.1, "d": 0.0}


def test_groups_that_are_added_count_and_groups_of_others_do_not() -> None:
    p, other = named(), nn.Parameter(torch.zeros(3))
    optimizer = SGD([{"params": [other], "lr": 9.0}, {"params": [p["a"]], "lr": 0.2}])
    rates = Rates([optimizer], p)
    assert max(rates().values()) == 0.2
    optimizer.add_param_group({"params": [p["d"]], "lr": 0.3})
    assert rates() == {"a": 0.2, "b": 0.0, "c": 0.0, "d": 0.3}
    optimizer.param_groups[1]["params"].append(p["b"])
    assert rates()["b"] == 0.2


def test_a_loaded_state_has_new_groups_and_rates_are_theirs() -> None:
    p = named()
    optimizer = SGD(p.values(), lr=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.7
    rates = Rates([optimizer], p)
    optimizer.load_state_dict(saved)
    assert max(rates().values()) == 0.7


def test_several_optimizers_and_rates_that_are_tensors() -> None:
    p = named()
    first, second = SGD([p["a"], p["b"]], lr=0.1), Adam([p["c"], p["b"]], lr=torch.tensor(0.25))
    rates = Rates([first, second], p)
    assert rates() == {"a": 0.1, "b": 0.25, "c": 0.25, "d": 0.0}


def test_without_an_optimizer_there_is_none() -> None:
    assert Rates([], named())() == dict.fromkeys("abcd", 0.0)
    assert not Rates([], {})()


# ---- of all ranks --------------------------------------------------------------------------------------


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
