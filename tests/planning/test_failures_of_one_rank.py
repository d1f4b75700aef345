"""What fails on one rank alone, between two collective calls: no other rank waits for it."""

import json
from types import SimpleNamespace
from typing import Any, NoReturn

import made_training as made
import pytest
import torch

from tacit.algorithms import parse
from tacit.errors import ConfigError, TacitError
from tacit.planning import step_prediction, step_profiler
from tacit.planning.step_prediction import StepPredictor
from tacit.planning.step_profiler import ProfileRequest, _Taking, gather_found, take
from tacit.transports.probing import RingCost

GROUP: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)


def fails(*_: object) -> NoReturn:
    raise RuntimeError("CUDA out of memory")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What this rank has told the other one, which tells it the same."""
    found = list[str]()

    def gather(mine: str, group: object) -> list[str]:
        found.append(mine)
        return [mine, mine]

    monkeypatch.setattr(step_profiler, "gather_texts", gather)
    monkeypatch.setattr(step_profiler, "ranks_of", lambda group: [4, 5])
    return found


def test_all_ranks_get_an_error_that_says_whose_it_is(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gather_found(lambda: "a", GROUP) == ["a", "a"]
    with pytest.raises(TacitError, match="ranks 4, 5: RuntimeError: CUDA out of memory") as caught:
        gather_found(fails, GROUP)
    assert isinstance(caught.value.__cause__, RuntimeError)
    monkeypatch.setattr(step_profiler, "gather_texts", lambda mine, group: [mine, told[-1]])
    with pytest.raises(TacitError, match="on rank 5: RuntimeError: CUDA out of memory"):
        gather_found(lambda: "a", GROUP)


def test_an_error_of_tacits_own_stays_what_it_is(told: list[str]) -> None:
    def refuses() -> NoReturn:
        raise ConfigError("no step was timed")

    timer: Any = SimpleNamespace(profile=lambda skipped: refuses(), on_gpu=False)
    options: Any = SimpleNamespace(model=SimpleNamespace(bucket_bytes_cap=1), group=GROUP)
    with pytest.raises(ConfigError, match="no step was timed"):
        take(timer, options, RingCost())
    assert json.loads(told[0]) == ["", "ConfigError: no step was timed"]


def test_costs_that_were_not_measured_are_left_out(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profiler, "measured_cost", fails)
    named = {name: torch.ones(shape) for name, shape in made.SHAPES.items()}
    taking: Any = SimpleNamespace(
        _request=ProfileRequest("out", ("topk", "int8"), ((2, 1),)),
        _spec=SimpleNamespace(named=named, group=GROUP),
    )
    assert _Taking._costs(taking, made.profile()) == []
    assert len(told) == 2, "it has come to the last collective call"


def test_a_step_that_one_rank_cannot_measure_is_predicted_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_prediction, "measured_cost", fails)
    slowest = list[float]()
    predictor = StepPredictor(
        *(made.profile(), made.network()), tensors={}, slowest=lambda mine: slowest.append(mine) or mine
    )
    assert predictor.predict(parse("topk")) is None
    assert slowest == [float("inf")]
