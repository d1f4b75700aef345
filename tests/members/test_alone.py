"""A member that is alone, in this process: what it would send another one; what it says once it has left."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.api import members_at_work
from tacit.api.member_changes import MembersChange
from tacit.api.members import MemberSession
from tacit.checkpoint import carried
from tacit.errors import AttachError, PeerLost
from tacit.members.record import RankArrival


def at_work(store: str, algorithm: str, steps: int = 3) -> MemberSession:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    session = tacit.attach(model, optimizer, algorithm, members=tacit.Members(store=store))
    assert isinstance(session, MemberSession)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    return session


@pytest.mark.parametrize("algorithm", ["lowbit", "dense", "zeroone-adam"])
def test_what_need_not_travel_to_another_member_is_left_out(store: str, algorithm: str) -> None:
    with at_work(store, algorithm) as session:
        spec, levels = session.options, session.levels
        kept = carried.present(spec, levels)
        of_a_mean = {"shared/0/0.weight/topology.second": torch.ones(32)}
        given = replace(kept, session=kept.session | of_a_mean)
        new, late = (carried.with_replica(given, spec, levels, newcomer) for newcomer in (True, False))
    trained = {"0.weight", "0.bias", "1.weight", "1.bias"}
    kinds = {each["exp_avg"].dtype for each in new.optimizers[0].values()}
    if algorithm == "dense":
        assert trained <= new.model.keys()
        assert kinds == {torch.float32}
    else:
        assert not trained & new.model.keys()
        assert kinds == {torch.bfloat16}
    assert len(late.optimizers) == (algorithm != "lowbit")
    assert "1.running_mean" in new.model
    assert any(key.startswith("rank0/") for key in kept.session) == (algorithm != "dense")
    assert not any(key.startswith("rank0/") or "topology" in key.split("/")[-1] for key in new.session)


@pytest.mark.parametrize("algorithm", ["postlocal:start_step=4", "snoo"])
def test_while_replicas_are_equal_another_one_takes_their_parameters(store: str, algorithm: str) -> None:
    """Where they step alone it begins where they agree in rounds; an outer step is no such point."""
    with at_work(store, algorithm) as session:
        spec, levels = session.options, session.levels
        whole = carried.with_replica(carried.present(spec, levels), spec, levels, newcomer=False)
        trained = {name: p.detach().clone() for name, p in spec.named.items()}
        for p in spec.named.values():
            torch.nn.init.zeros_(p)
        carried.take(whole, spec, levels, 3, unacted=False, own=False)
        assert all(torch.equal(p, trained[name]) for name, p in spec.named.items())
        assert {each["exp_avg"].dtype for each in whole.optimizers[0].values()} == {torch.float32}


def test_another_version_of_what_members_write_is_refused(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_work(store, "lowbit", steps=0):
        pass
    monkeypatch.setattr(members_at_work, "form", lambda: "another")
    with pytest.raises(AttachError, match=r"another version of tacit than.*texts another here"):
        at_work(store, "lowbit")


def test_rounds_that_follow_measurements_go_on_as_the_source_says(store: str) -> None:
    with at_work(store, "localsgd:sync_every=2") as session:
        at, level = session.members, session.levels[0]
        kept = carried.present(session.options, session.levels)
        schedule = json.dumps([{"period": 5.0}])
        of = replace(at.roster.period.members[0], step=4, ranks=[RankArrival(1, schedule=schedule)])
        at._shards[0]._found = kept
        at._shards[0].take(replace(at.roster.period, members=[of]), 0)
        assert (session.step, level.session.schedule.state) == (4, {"period": 5.0})


def test_who_has_given_up_waiting_is_in_no_later_period(store: str) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    two = tacit.Members(store=store, min=2, patience=0.5)
    with pytest.raises(
        PeerLost, match="there are 1 of the 2 members that min asks for: start others, or write a lower"
    ):
        tacit.attach(model, optimizer, "lowbit", members=two)
    with at_work(store, "lowbit") as session:
        assert (session.members.number, session.members.size) == (1, 1)


@pytest.mark.parametrize("algorithm", ["lowbit", "dense"])
def test_a_step_that_its_scaler_skips_is_not_counted(store: str, algorithm: str) -> None:
    """So the others wait for the step that it takes in its place."""
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    members = tacit.Members(store=store)
    with tacit.attach(model, optimizer, algorithm, scaler=scaler, members=members) as session:
        steps = []
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * model(torch.ones(4, 8)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            steps.append(session.step)
    assert steps == [1, 1, 2]
    assert scaler.get_scale() == 2.0**15
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_it_may_be_asked_when_it_has_left(store: str) -> None:
    session = at_work(store, "lowbit")
    session.leave()
    metrics = session.metrics()
    assert (metrics["steps"], metrics["rounds"], metrics["lost_steps"]) == (3, 3, 0)
    assert "tacit_lost_steps" in session.metrics_text()
    assert session.closed


def test_a_change_while_a_state_is_taken_is_another_try(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take, fails = carried.take, [MembersChange("somebody has arrived")]

    def fail_once(*given: Any) -> None:
        if fails:
            raise fails.pop()
        take(*given)

    monkeypatch.setattr(carried, "take", fail_once)
    with at_work(store, "lowbit") as session:
        assert session.members.number == 2
        assert session.metrics()["rounds"] == 3


def test_a_warning_of_attach_is_said_once(store: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each period of the members begins a strategy anew, and the first one is warmed up."""
    with at_work(store, "topk:ratio=0.5"):
        assert caplog.text.count("many steps late, which cost accuracy with AdamW") == 1
