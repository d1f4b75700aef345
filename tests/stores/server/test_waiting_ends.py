"""Nobody waits for ever: every world of three workers, walked through to the end, and larger ones at random.

Whoever does nothing more may have frozen, have died, have ended early, or never have come. So in every
state: while somebody waits, the service names for whom, and when these are given up, all waiting ends; and
when all who can end early do so, all waiting ends with no one given up.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduled_service import BACK, World, one

from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.parameter_service import ParameterService
from tacit.topologies import Asynchronous, StaleSynchronous, Star, Synchronous

STARS = [
    Star(Asynchronous()),
    Star(StaleSynchronous(0)),
    Star(StaleSynchronous(1)),
    Star(StaleSynchronous(2)),
    Star(Synchronous(), optimizer="server"),
    Star(Synchronous(backup_workers=1)),
    Star(Synchronous(backup_workers=2)),
    Star(),
]
SIZES = [(2, 2, 2), (3, 1, 2)]
"""Workers, their lives, and how often each pushes in a life, at most."""


def world(star: Star, workers: int) -> World:
    return World(
        AveragingService(workers, "bucket")
        if star.averages
        else ParameterService(workers, star, BACK, None, "bucket"),
        workers,
    )


ACTS = ("enter", "push", "meet", "kill")


def can(world: World, act: str, i: int, lives: int = 9, steps: int = 9) -> bool:
    worker = world.workers[i]
    if act == "enter":
        return not worker.alive and worker.incarnation < lives
    if act == "kill":
        return worker.alive
    if not worker.alive or worker.busy or worker.refused:
        return False
    return act == "meet" or worker.pushed < steps


def do(world: World, act: str, i: int) -> None:
    if act == "enter":
        world.workers[i].refused.clear()
        world.workers[i].pushed = 0
    {"enter": world.enter, "kill": world.kill, "meet": world.meet}.get(act, lambda i: world.push(i, one(i)))(
        i
    )


def where(world: World) -> list[tuple[object, ...]]:
    """What tells states apart, but for the numbers in the parameters, and for who is who."""
    state, service = world.state, world.service
    version = getattr(state, "version", 0)
    by_round = isinstance(service, ParameterService) and isinstance(service.star.consistency, Synchronous)
    pushed = {each if isinstance(each, int) else each.worker for each in state.pushed}
    return sorted(
        (
            *(w.alive, w.busy, w.incarnation, w.pushed, bool(w.refused)),
            *(d.present, d.incarnation, d.clock - (version if by_round else 0), version - d.pulled),
            *(w.number in getattr(state, name, ()) for name in ("waiting", "entering", "meeting")),
            *(w.number in pushed, w.number == getattr(state, "bringing", None)),
        )
        for w, d in zip(world.workers, state.records, strict=True)
    )


def states(star: Star, workers: int, lives: int, steps: int) -> Iterator[World]:
    """Each that can be reached, once."""
    first = world(star, workers)
    seen, ahead = {str(where(first))}, [first]
    while ahead:
        here = ahead.pop()
        yield here
        for act, i in product(ACTS, range(workers)):
            if can(here, act, i, lives, steps):
                there = copied(here)
                do(there, act, i)
                if str(where(there)) not in seen:
                    seen.add(str(where(there)))
                    ahead.append(there)


def copied(there: World) -> World:
    """Numbers in tensors are shared, as no decision goes by them."""
    here = copy.copy(there)
    here.workers = [replace(worker, refused=[*worker.refused], stale=[]) for worker in there.workers]
    here.order = []
    return here


def busy(world: World) -> list[int]:
    return [w.number for w in world.workers if w.alive and w.busy]


def give_up(world: World, i: int) -> None:
    """As the host does with one of which nothing is heard."""
    worker, record = world.workers[i], world.state.records[i]
    sender = worker.sender._replace(incarnation=record.incarnation)
    worker.alive = worker.busy = False
    replies, world.state = world.service.leave(sender, f"rank {i} was silent", world.state)
    world.hear(replies)


def check_frozen(world: World) -> None:
    """All who can act do nothing more: those that are waited for are named, until nobody waits."""
    while busy(world):
        waiting, missing = busy(world), world.service.missing(world.state)
        assert missing, f"ranks {waiting} wait, and nobody is named: {where(world)}"
        assert not missing & set(waiting), f"{missing} are named, and wait themselves: {where(world)}"
        for i in missing:
            give_up(world, i)


def check_early(world: World) -> None:
    """All who can act have nothing more to push, and say so; to a server that averages, by leaving."""
    averages = isinstance(world.service, AveragingService)
    met = {*getattr(world.state, "meeting", ())}
    for worker in world.workers * (len(world.workers) + 1):
        i = worker.number
        if (
            not worker.incarnation
            or worker.refused
            or (worker.alive and not worker.busy and (i in met or averages))
        ):
            give_up(world, i)
        elif can(world, "meet", i):
            met.add(i)
            world.meet(i)
    assert not busy(world), f"ranks {busy(world)} wait, though all have ended: {where(world)}"


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("star", STARS, ids=str)
def test_in_every_state_all_waiting_ends(star: Star, size: tuple[int, int, int]) -> None:
    count = 0
    for each in states(star, *size):
        count += 1
        check_frozen(copied(each))
        check_early(copied(each))
    assert count > 100


@settings(deadline=None)
@given(
    star=st.sampled_from(STARS),
    workers=st.integers(2, 5),
    acts=st.lists(
        st.tuples(st.sampled_from(["enter", "push", "push", "push", "meet", "kill"]), st.integers(0, 4))
    ),
)
def test_in_larger_worlds_all_waiting_ends(star: Star, workers: int, acts: list[tuple[str, int]]) -> None:
    here = world(star, workers)
    for i in range(workers - 1):
        here.enter(i)
    for act, i in acts:
        if i < workers and can(here, act, i):
            do(here, act, i)
        check_frozen(copied(here))
        check_early(copied(here))


def test_one_that_ends_early_is_not_waited_for() -> None:
    here = world(Star(StaleSynchronous(1)), 3)
    for i in range(3):
        here.enter(i)
    here.meet(1)
    for _ in range(5):
        for i in (0, 2):
            here.push(i, one(i))
            assert not here.workers[i].busy
    here.meet(0)
    here.meet(2)
    assert not busy(here)
    assert all(torch.equal(worker.has, here.state.x) for worker in here.workers)
