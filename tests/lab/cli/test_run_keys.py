"""Which runs a comparison makes, and in which order."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tacit.algorithms import parse
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.cli.compare.run_keys import missing, place
from tacit_lab.cluster import Cluster
from tacit_lab.records import CHOOSING, EndRecord, RunKey

OPTIONS = CompareOptions(
    recipe="digits",
    cluster=Cluster.parse("local:2"),
    strategies=(parse("ddp"), parse("topk")),
    epochs=1,
    target=0.9,
    timeout=60,
    folder=Path(),
    seeds=(0, 3),
)


def ran(options: CompareOptions, judge: Callable[[RunKey], float] = lambda key: 0.0) -> list[RunKey]:
    """All runs, each made as soon as it is due; `judge`: what comes of it on validation."""
    ends: dict[RunKey, EndRecord] = {}
    while (key := next(missing(options, ends), None)) is not None:
        assert key not in ends
        ends[key] = EndRecord(**key._asdict(), status="ok", validation=judge(key), loss=1.0)
    return [*ends]


def test_seed_after_seed_and_the_limit_last() -> None:
    assert ran(OPTIONS) == [
        RunKey("ddp", 0, 1.0),
        RunKey("topk", 0, 1.0),
        RunKey("ddp", 3, 1.0),
        RunKey("topk", 3, 1.0),
        RunKey("compute-only", 0, 1.0),
    ]


def test_the_best_rate_is_searched_with_another_seed_beyond_the_ends_too() -> None:
    best = {"ddp": 1.0, "topk": 4.0}
    keys = ran(
        replace(OPTIONS, rates=(0.5, 1.0, 2.0)), lambda key: -abs(key.rate - best.get(key.algorithm, 1))
    )
    searched = [(key.algorithm, key.rate) for key in keys if key.seed == CHOOSING]
    assert searched == [
        *(("ddp", rate) for rate in (0.5, 1.0, 2.0)),
        *(("topk", rate) for rate in (0.5, 1.0, 2.0, 4.0, 8.0)),
    ]
    assert {(key.algorithm, key.rate) for key in keys if key.seed != CHOOSING} == {
        ("ddp", 1.0),
        ("topk", 4.0),
        ("compute-only", 1.0),
    }


def test_how_many_there_are_is_said_as_far_as_it_is_known() -> None:
    ends = {key: EndRecord(**key._asdict(), status="ok") for key in (RunKey("ddp", 0, 1.0),)}
    assert place(OPTIONS, {}, 0) == "training 1 of 5"
    assert place(OPTIONS, ends, 1) == "training 3 of 5"
    assert place(replace(OPTIONS, rates=(0.5, 1.0, 2.0)), {}, 0) == "training 1 of about 11"


def test_the_search_ends_where_every_rate_is_worse_than_the_next() -> None:
    rates = [key.rate for key in ran(replace(OPTIONS, rates=(0.5, 1.0)), lambda key: -key.rate)]
    assert min(rates) >= 1 / 1024


def test_of_rates_that_validation_does_not_tell_apart_the_loss_in_training_decides() -> None:
    """By the rule of `tacit study`: of 4,096 sessions one standard error is 0.008."""
    options = replace(OPTIONS, recipe="recommender", strategies=(parse("topk"),), rates=(0.5, 1.0, 2.0))
    found = {0.5: (0.5, 1.2), 1.0: (0.496, 1.1), 2.0: (0.48, 0.9)}
    ends = {
        key: EndRecord(
            **key._asdict(), status="ok", validation=found[rate][0], training_loss=found[rate][1], loss=rate
        )
        for rate in found
        for key in [RunKey("topk", CHOOSING, rate)]
    }
    assert next(missing(options, ends)) == RunKey("topk", 0, 1.0)


def test_a_step_that_is_a_sign_has_far_smaller_rates_and_a_coder_those_of_what_it_codes() -> None:
    arms = ("signsgd", "lowbit", "lowbit:entropy=true")
    keys = ran(
        replace(OPTIONS, strategies=tuple(map(parse, arms)), rates=(0.5, 1.0, 2.0)),
        lambda key: -abs(key.rate - (1 / 128 if key.algorithm == "signsgd" else 1)),
    )
    searched = [(key.algorithm, key.rate) for key in keys if key.seed == CHOOSING]
    assert searched == [
        *(("signsgd", rate / 128) for rate in (0.5, 1.0, 2.0)),
        *(("lowbit", rate) for rate in (0.5, 1.0, 2.0)),
    ]
    assert ("lowbit:entropy=true", 1.0) in {(key.algorithm, key.rate) for key in keys}


def test_runs_that_failed_are_made_again() -> None:
    key = RunKey("ddp", 0, 1.0)
    for status, first in (("ok", RunKey("topk", 0, 1.0)), ("failed", key), ("interrupted", key)):
        end = EndRecord(**key._asdict(), status=status)  # type: ignore[arg-type]
        assert next(missing(OPTIONS, {key: end})) == first
