"""Answers that are applied late, where the members change: some have applied one, and others have not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batchnorm_replicas import Member, Normed, network

from tacit.algorithms import parse
from tacit.checkpoint import carried
from tacit.merges import EagerStep
from tacit.replicas.buffers import MOVED
from tacit.strategy import Strategy

LATE = (
    "streaming-diloco:sync_every=12,fragments=2",
    "streaming-diloco:sync_every=12,fragments=3,fragment_sync_delay=6",  # two rounds are under way at once
    "eager-diloco:sync_every=6",
    "localsgd:sync_every=6,fragments=2,fragment_sync_delay=2",
    "lowbit:sync_every=2,late=1",
    "overlap-localsgd:sync_every=3",
    "dilocox:sync_every=4",
    "odsgd",
)


def of(member: Member) -> Any:
    module = member.module
    return SimpleNamespace(
        strategy=member.strategy,
        named=dict(module.named_parameters()),
        model=SimpleNamespace(module=module),
        optimizers=(),
    )


def alone(crew: Normed, which: int) -> None:
    """One of them takes a step, and the others do not."""
    members, crew.members = crew.members, [crew.members[which]]
    crew.train(1)
    crew.members = members


def due_next(member: Member) -> bool:
    return any(way.apply_at == member.session.step for way in member.progress.under_way)


def trained(strategy: Strategy) -> Normed:
    """Two replicas that are to apply an answer after their next step; it has come."""
    crew = Normed(strategy, 2)
    crew.train(15)
    while not due_next(crew.members[0]):
        crew.train(1)
    for member in crew.members:
        member.session.flush()
    return crew


@pytest.mark.parametrize("algorithm", LATE)
def test_one_has_applied_an_answer_and_another_has_not(algorithm: str) -> None:
    """A third one comes just then, and takes the state of the first; all of them go on together."""
    (strategy,) = parse(algorithm).levels
    crew = trained(strategy)
    ahead, behind = crew.members
    way = ahead.progress.under_way[0]
    alone(crew, 0)
    assert way not in ahead.progress.under_way
    kept = [carried.present(of(each), [each]) for each in crew.members]
    torch.manual_seed(1)
    modules = iter([ahead.module, behind.module, network().apply(moved)])
    after = Normed(strategy, 3, lambda: next(modules))
    given = carried.with_replica(kept[0], of(ahead), [ahead], newcomer=True)
    for each, state, own in zip(after.members, (*kept, given), (True, True, False), strict=True):
        carried.take(state, of(each), [each], ahead.session.step, unacted=False, own=own)
    assert {tuple(way.buckets for way in each.progress.under_way) for each in after.members} == {
        tuple(way.buckets for way in after.members[0].progress.under_way)
    }
    after.train(30)
    after.sync()
    first, *others = [each.module.state_dict() for each in after.members]
    assert all(torch.equal(first[name], each[name]) for each in others for name in first)
    after.close()


def moved(module: torch.nn.Module) -> None:
    for p in module.parameters(recurse=False):
        torch.nn.init.normal_(p)


def test_of_a_round_that_has_failed_nothing_is_left_of_its_buffers() -> None:
    """The means of buffers may have come where those of parameters have not."""
    (strategy,) = parse("localsgd:sync_every=6,fragment_sync_delay=2").levels
    crew = trained(strategy)
    flag = "1.running_mean", MOVED
    for member, failed in zip(crew.members, (True, False), strict=True):
        assert float(member.progress.saved_state()[flag].tensor) == 1
        member.progress.under_way[0].pending.ended = not failed  # type: ignore[union-attr]
        carried.present(of(member), [member])
        assert float(member.progress.saved_state()[flag].tensor) == (0 if failed else 1)
    crew.close()


def test_what_a_dropped_round_carried_is_not_taken_for_an_eager_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (strategy,) = parse("eager-diloco:sync_every=6").levels
    crew = trained(strategy)
    step, since = crew.members[0].session.step, list[int]()
    for member in crew.members:
        member.progress.under_way[0].pending.ended = False  # type: ignore[union-attr]
    kept = [carried.present(of(each), [each]) for each in crew.members]
    modules = iter([each.module for each in crew.members])
    after = Normed(strategy, 2, lambda: next(modules))
    for each, state in zip(after.members, kept, strict=True):
        carried.take(state, of(each), [each], step, unacted=False, own=True)
    apply = EagerStep.apply_

    def noted(*given: Any) -> None:
        since.append(given[-1].since_equal)
        apply(*given)

    monkeypatch.setattr(EagerStep, "apply_", noted)
    after.train(13)
    assert since
    assert since[0] <= 6 < since[-1]
    crew.close()
    after.close()
