"""Laws for rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tacit.contracts import AdaptiveRounds, Rounds, ScheduleState
from tacit.testing.ranks import naming

KNOWN = {"steps_per_epoch": 10.0, "epochs": 50.0}
"""The facts about the training that rounds get."""


def check_rounds(rounds: Rounds, *, steps: int = 300, known: Mapping[str, float] = KNOWN) -> int:
    """Check rounds against their laws, over so many steps of a training whose loss falls.

    Called twice, they give the same answer, and calling changes nothing: otherwise ranks would disagree, and
    wait for each other. The state is numbers, and they go on the same after a round trip of the state through
    JSON, as in a checkpoint. No answer is applied before its round has left. Every part of the model has a
    round.

    Args:
        known: the values that rounds may need (`Rounds.needs`).

    Returns:
        How many rounds there were, over all parts.

    Raises:
        AssertionError: a law does not hold.
    """
    with naming(rounds):
        missing = rounds.needs - known.keys()
        assert not missing, f"they need {sorted(missing)}: give known="
        state: ScheduleState = {**rounds.start(), **known}
    parts = rounds.fragments
    counts = [0] * parts
    for step in range(steps):
        with naming(rounds, f"step {step}"):
            again = _numbers(state)
            for part in range(parts):
                sync = rounds.at(step, state, part)
                assert sync == rounds.at(step, state, part), "asked twice, they answer otherwise"
                assert sync == rounds.at(step, again, part), (
                    "with a checkpoint's state, they answer otherwise"
                )
                assert state == again, "asking has changed the state"
                if sync is None:
                    continue
                counts[part] += 1
                assert sync.apply_at >= step, f"applied after step {sync.apply_at}, before the round has left"
                if sync.observe and isinstance(rounds, AdaptiveRounds):
                    state = _observed(rounds, state, step)
                    again = _numbers(state)
    silent = [part for part, count in enumerate(counts) if not count]
    assert not silent, f"{rounds}: no round of the parts {silent} in {steps} steps"
    return sum(counts)


def _observed(rounds: AdaptiveRounds, state: ScheduleState, step: int) -> ScheduleState:
    facts = {"step": float(step), "lr": 0.1, "loss": 2.0 / (1 + step / 50), "drift": 1e-3, "transfer": 2.0}
    before = _numbers(state)
    new = rounds.observe(state, facts)
    assert state == before, "observe() has changed the state that it was given"
    assert new == rounds.observe(before, facts), "of the same facts, observe() makes another state"
    return new


def _numbers(state: ScheduleState) -> ScheduleState:
    """The state as a checkpoint gives it back."""
    odd = {name: value for name, value in state.items() if not isinstance(value, int | float)}
    assert not odd, f"the schedule state holds what is no number: {odd}"
    return dict(_as_saved(state))


def _as_saved(state: ScheduleState) -> Iterator[tuple[str, float]]:
    yield from json.loads(json.dumps(dict(state))).items()
