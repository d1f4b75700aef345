"""A session's state in which something is damaged: refused, and nothing is changed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from replica_threads import Crew
from test_resize import Run, trained
from torch import Tensor

from tacit import algorithms
from tacit.checkpoint import session_state
from tacit.checkpoint.saved_values import CHECKSUMS, LAST_EQUAL, sealed
from tacit.errors import CheckpointError

GRADIENTS = ("topk:ratio=0.1", "powersgd:rank=2", "efsign", "dgc:ratio=0.1")
DELTAS = (
    "localsgd:sync_every=3",
    "adacomm:sync_every=2",
    "streaming-diloco:sync_every=6,fragments=2",
    "choco:ratio=0.5",
)
NAMES = [*GRADIENTS, *DELTAS]
WRONG = (None, -5, 10**30, math.nan, "7", b"7", [], ["7"], {}, [[["a"]]], [[["a", "a"]]], True)
LEAVES = (None, -5, 1.5, 10**30, math.nan, math.inf, "7", [], {}, True)
TEXTS = ("", "{", "null", "7", "[" * 100_000, '{"a": NaN}')


def saved(name: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """A strategy at work on rank 0, its level, and its state behind some rounds."""
    if name in GRADIENTS:
        run: Run = trained(algorithms.parse(name).levels[0], 2, 1)
        return run.strategy, run.seats[:1], sealed(run.save()[0])
    crew = Crew(name, peers=2)
    crew.train(7, loss=lambda step: 1.0 / (1 + step))
    state = crew.save()[0]
    del state["parameters"]
    return crew.strategy, crew.replicas[:1], sealed(state)


def values(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All that is in lists and mappings, with where."""
    yield path, found
    items = enumerate(found) if isinstance(found, list) else found.items() if isinstance(found, dict) else ()
    for key, each in items:
        yield from values(each, (*path, key))


def put(found: Any, path: tuple[Any, ...], bad: Any) -> Any:
    """The same with another value there."""
    if not path:
        return bad
    found = deepcopy(found)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = bad
    return found


def legitimate(key: str, path: tuple[Any, ...], was: Any, bad: Any) -> bool:
    """Whether a run may have such a value."""
    alike, number = type(was) is type(bad), type(bad) in (int, float)
    if alike and was == bad:
        return True
    if key in ("strategy", "topologies", "schedules"):  # another's, which is only told, or begun anew with
        return alike and bad not in ([], "")
    if key in ("learning_rates", "last_equal", "variances", "pending_rounds") and bad in ([], {}):
        return alike and (key == "last_equal" or len(path) > 0)  # fewer are known, or under way
    if key in ("layouts", "learning_rates") and bad is None:
        return len(path) == (key == "layouts")
    if key == "schedule_state":
        return len(path) == 2 and number and math.isfinite(bad) and (path[1] != "period" or bad >= 1)
    return isinstance(was, float) and number and math.isfinite(bad) and bad > 0


def damages(state: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state with each of its fields damaged in each way."""
    told = json.loads(state[LAST_EQUAL])
    for key in (
        "else",
        "rank0/0/a/else",
        "rank2/0/a/own",
        "shared/1/a/anchor",
        "own of rank2",
        "node0/0/a/mean",
    ):
        yield f"{key} is there", {**state, key: torch.zeros(300) if "/" in key else "{}"}
    bare = {**state, LAST_EQUAL: json.dumps({key: each for key, each in told.items() if key != CHECKSUMS})}
    for key, value in bare.items():
        if isinstance(value, Tensor):
            yield f"a flipped bit in {key}", {**state, key: flipped(value)}
            nan = value.clone()
            nan[-1] = math.nan
            wrong = (None, 7, [1.0], nan, value + math.inf, value.to(torch.complex64), value.to(torch.int64))
            wrong += (value[:-1], value[None], value.to_sparse(), value.to("meta"))
            for bad in wrong if "losses" not in key else (*wrong[:3], *wrong[5:]):
                yield f"{key} is {bad!s:.40}", {**bare, key: bad}
            continue
        for bad in WRONG if key != "version" else (None, "7", 1.5, True, -5, 10**30):
            if not legitimate(key, (), value, bad):
                yield f"{key} is {bad}", {**bare, key: bad}
        if key not in ("learning_rates", "last_equal", "variances", "version"):
            yield f"no {key}", {each: bare[each] for each in bare if each != key}
        if isinstance(value, str) and value[0] in "[{" and key not in ("strategy", "strategy_without_rounds"):
            for bad in TEXTS:
                yield f"{key} is {bad:.20}", {**bare, key: bad}
            for path, was in values(json.loads(value)):
                for bad in LEAVES:
                    if not legitimate(key, path, was, bad):
                        yield (
                            f"{key}{path} is {bad}",
                            {**bare, key: json.dumps(put(json.loads(value), path, bad))},
                        )
        elif isinstance(value, list):
            for path, was in values(value):
                for bad in LEAVES if path else ():
                    if not legitimate(key, path, was, bad) and not (key == "nodes" and path == (0,)):
                        yield f"{key}{path} is {bad}", {**bare, key: put(value, path, bad)}


def flipped(x: Tensor) -> Tensor:
    """The same but for one bit of its last entry."""
    x = x.clone()
    x.view(torch.uint8)[-1] ^= 4
    return x


def now(level: Any) -> list[Any]:
    """All that loading a state changes."""
    session = level.session
    kept = session.store.named_state() | (level.progress.saved_state() if level.progress else {})
    counted = session.step, session.round, dict(session.schedule.state), session_state._own(session)
    return [counted, {key: each.tensor.clone() for key, each in kept.items()}]


@pytest.mark.parametrize("name", NAMES)
def test_each_damage_is_refused_and_changes_nothing(name: str) -> None:
    strategy, (level,), state = saved(name)
    before, escaped, count = now(level), [], 0
    for what, bad in damages(state):
        count += 1
        try:
            session_state.load(bad, strategy, [level])
            escaped.append(f"{what}: accepted")
        except CheckpointError:
            pass
        except Exception as error:
            escaped.append(f"{what}: {type(error).__name__}: {error}")
    assert not escaped, f"{len(escaped)} of {count}: {escaped}"
    assert count > 190
    after = now(level)
    assert after[0] == before[0]
    assert all(torch.equal(x, after[1][key]) for key, x in before[1].items())
    session_state.load(state, strategy, [level])


@pytest.mark.parametrize("other", [None, 7, [], "text", {7: 7}, {}], ids=str)
def test_what_is_no_state_is_refused(other: Any) -> None:
    strategy, levels, state = saved("topk:ratio=0.1")
    with pytest.raises(CheckpointError, match="no state of a tacit session, or it was damaged or cut short"):
        session_state.load(other, strategy, levels)
    with pytest.raises(CheckpointError):
        session_state.join_states([state, other])


def test_a_state_with_the_keys_of_another_strategy_is_refused() -> None:
    strategy, levels, state = saved("topk:ratio=0.1")
    _, _, other = saved("powersgd:rank=2")
    keys = {key: each for key, each in other.items() if "/" in key}
    with pytest.raises(CheckpointError, match=r"lacks 'rank0/0/./residual'"):
        session_state.load(
            {key: each for key, each in state.items() if "/" not in key}
            | {key: each for key, each in keys.items() if not key.endswith("residual")},
            strategy,
            levels,
        )
    says = r"has 'shared/0/./inner.q', which no session of its strategy saves"
    with pytest.raises(CheckpointError, match=says):
        session_state.load({**keys, **state}, strategy, levels)


def test_joined_states_have_the_checksums_of_all() -> None:
    run = trained(algorithms.parse("topk:ratio=0.1").levels[0], 2, 1)
    states = [sealed(each) for each in run.save()]
    whole = session_state.join_states(states)
    run.load(whole)
    for rank in range(2):
        key = f"rank{rank}/0/a/residual"
        with pytest.raises(CheckpointError, match=f"'{key}' is not what was saved"):
            run.load({**whole, key: flipped(whole[key])})
        mine = {**states[rank], key: flipped(whole[key])}
        with pytest.raises(CheckpointError, match=f"'{key}' is not what was saved"):
            session_state.load(mine, run.strategy, [run.seats[rank]])


@pytest.mark.parametrize(
    ("attached", "says"),
    [
        ("topk:ratio=0.1", "the checkpoint is of 'powersgd:rank=2', and attached is 'topk:ratio=0.1'"),
        ("powersgd:rank=3", "the checkpoint is of 'powersgd:rank=2', and attached is 'powersgd:rank=3'"),
    ],
)
def test_another_strategy_is_named_shortly_behind_what_to_do(attached: str, says: str) -> None:
    _, _, state = saved("powersgd:rank=2")
    strategy, levels, _ = saved(attached)
    with pytest.raises(CheckpointError) as refused:
        session_state.load(state, strategy, levels)
    text = str(refused.value)
    assert text.startswith("attach the same strategy, or start without the session's state: ")
    assert says in text
    assert len(text) < 400


def test_of_two_strategies_of_one_name_what_differs_is_shown() -> None:
    one, other = (replace(algorithms.parse(f"topk:ratio={ratio}"), name="mine") for ratio in (0.1, 0.2))
    theirs, ours = session_state._told_apart(repr(one), other)
    assert theirs.startswith("'mine' with ")
    assert ours.startswith("'mine' with ")
    assert "0.1" in theirs
    assert "0.2" in ours
    assert len(theirs + ours) < 200
