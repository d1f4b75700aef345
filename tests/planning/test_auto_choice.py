"""How `auto` chooses, as far as no rank is needed for it."""

import math
from itertools import pairwise

import pytest

from tacit import described
from tacit.algorithms import parse
from tacit.algorithms.auto import CANDIDATES, candidates
from tacit.api.choosing import step_seconds
from tacit.errors import ConfigError
from tacit.planning.decider import Choice, from_all_texts
from tacit.strategy import AutoStrategy
from tacit.timelines import Exchange, Span, Step, Timeline, one_after_another


def test_each_word_allows_what_those_before_it_allow() -> None:
    found = [candidates(word) for word in CANDIDATES]
    assert found[0] == ["ddp", "dense"]
    assert all(more[: len(less)] == less for less, more in pairwise(found))
    subjects = [[level.subject for level in parse(text).levels][-1] for text in found[-2]]
    assert "delta" not in subjects  # replicas differ by the last word alone
    one_shot = [parse(text).levels[0].compressor.one_shot(0) for text in ("int8", *CANDIDATES["feedback"])]
    assert all(each is None or each.has_feedback for each in one_shot)


def test_the_text_form_of_auto() -> None:
    assert parse("auto") == AutoStrategy()
    written = parse("auto:accept=periodic,watch=none,tolerance=0.5,rest=10")
    assert written == AutoStrategy(accept="periodic", watch=None, tolerance=0.5, rest=10)
    assert parse("auto").levels == parse("dense").levels
    with pytest.raises(ConfigError, match="Known: exact, feedback, periodic, rounded"):
        parse("auto:accept=all")


def test_a_pause_does_not_count_and_a_period_counts_as_a_whole() -> None:
    steps, ends = [1.0, 1.0, 5.0] * 4, [0.0]
    for each in steps:
        ends.append(ends[-1] + each)
    assert step_seconds(ends, window=12, period=3) == pytest.approx(7 / 3)
    paused = [at + (100.0 if i > 6 else 0.0) for i, at in enumerate(ends)]
    assert step_seconds(paused, window=12, period=3) == pytest.approx(7 / 3)
    assert step_seconds(ends, window=3, period=1) == 1.0
    assert math.isinf(step_seconds(ends[:2], window=12, period=3))


def test_a_choice_goes_to_json_and_back() -> None:
    choice = Choice("bf16", "half the bytes", 0.25, (("ddp", 0.5), ("bf16", 0.25), ("daso", None)))
    assert described.read(choice.to_json(), Choice) == choice
    with pytest.raises(ConfigError, match="seconds=0 is not a finite number above 0"):
        Choice("bf16", "half the bytes", 0)


def test_texts_of_any_length_reach_all() -> None:
    assert from_all_texts(lambda row: row[None], "läuft \u2713") == ["läuft \u2713"]
    assert from_all_texts(lambda row: row[None], "") == [""]


def test_timelines_of_strategies_follow_each_other() -> None:
    def part(origin: float, level: str, step: int) -> Timeline:
        exchange = Exchange(0, step, 0, 1.0, 2.0, 8, False, (Span(1.0, 1.5),))
        return Timeline(
            algorithm="some",
            rank=1,
            origin=origin,
            levels=(level,),
            steps=(Step(step, 0.0, 3.0),),
            exchanges=(exchange,),
        )

    whole = one_after_another([(0, part(10.0, "exchange", 4)), (5, part(20.0, "far", 0))])
    assert (whole.levels, whole.origin) == (("exchange", "far"), 10.0)
    assert whole.steps == (Step(4, 0.0, 3.0), Step(5, 10.0, 13.0))
    assert [(each.level, each.step, each.begun) for each in whole.exchanges] == [(0, 4, 1.0), (1, 5, 11.0)]
