"""Members of unequal speed: what they do until all are ready, and how much each counts."""

from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replica_threads import Crew, Replica
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.api import semi_synchronous
from tacit.api.semi_synchronous import SemiSynchronous
from tacit.errors import AttachError, ConfigError


@pytest.fixture(autouse=True)
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semi_synchronous, "BEAT", 0.0)


class WaitsSoLong(SemiSynchronous):
    """Finds all ready after so many looks in each round."""

    def __init__(self, weight: float | None, looks: list[int]) -> None:
        roster: Any = SimpleNamespace(way=None, called=Event(), away_since=0.0)
        super().__init__(roster, True, weight)
        self.looks = looks

    def _all_ready(self, round: int) -> bool:
        self.looks[round] -= 1
        return self.looks[round] < 0


@pytest.mark.parametrize("weights", [(None, None, None), (1.0, 2.0, 0.5)])
def test_means_are_weighed_by_steps(weights: tuple[float | None, ...]) -> None:
    crew, beyond = Crew("localsgd:sync_every=4", 3), [[0, 2], [3, 0], [5, 0]]
    semis: list[Any] = [WaitsSoLong(weight, [*looks]) for weight, looks in zip(weights, beyond, strict=True)]
    moves = [1.0, -2.0, 4.0]

    def work(rank: int, replica: Replica) -> None:
        while replica.session.step < 8:
            for p in replica.named.values():
                p.add_(moves[rank])
            if not semis[rank].goes_on([replica]):
                semis[rank].weigh([replica])
                replica.progress.after_step()

    crew.each(work)
    expected = 1.0
    for round in range(2):
        steps = [4 + each[round] for each in beyond]
        counts = [n * (w or 1.0) for n, w in zip(steps, weights, strict=True)]
        expected += sum(c * n * m for c, n, m in zip(counts, steps, moves, strict=True)) / sum(counts)
    for replica, semi, each in zip(crew.replicas, semis, beyond, strict=True):
        torch.testing.assert_close(replica.flat, torch.full_like(replica.flat, expected))
        assert semi.metrics == {"extra_steps": sum(each)}


def trained(store: str, algorithm: str, **more: Any) -> Any:
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    members = tacit.Members(store=store, **{"semi_synchronous": True, **more})
    session = tacit.attach(model, optimizer, algorithm, members=members)

    def step() -> int:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        return int(session.step)

    return session, step


def test_steps_beyond_the_period_are_not_counted(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = iter([False, False, True, False, True])
    monkeypatch.setattr(SemiSynchronous, "_all_ready", lambda self, round: next(ready))
    session, step = trained(store, "diloco:sync_every=2")
    with session:
        assert [step() for _ in range(7)] == [1, 1, 1, 2, 3, 3, 4]
        metrics = session.metrics()
        assert (metrics["steps"], metrics["extra_steps"], metrics["rounds"]) == (4, 3, 2)


def test_one_that_is_alone_is_ready(store: str) -> None:
    session, step = trained(store, "localsgd:sync_every=2")
    with session:
        assert [step() for _ in range(4)] == [1, 2, 3, 4]
        assert session.metrics()["extra_steps"] == 0


@pytest.mark.parametrize("algorithm", ["lowbit", "dense", "streaming-diloco", "localsgd:sync_every=1"])
def test_what_it_is_not_for(store: str, algorithm: str) -> None:
    with pytest.raises(AttachError, match=r"semi_synchronous=True with .* is not possible, as its means"):
        trained(store, algorithm)


def test_all_say_so_or_none(store: str) -> None:
    session, _ = trained(store, "localsgd:sync_every=2")
    with session, pytest.raises(AttachError, match="another semi_synchronous than the training for which"):
        trained(store, "localsgd:sync_every=2", semi_synchronous=False)


def test_not_with_a_quorum() -> None:
    with pytest.raises(ConfigError, match="quorum and semi_synchronous exclude each other"):
        tacit.Members(quorum=2, semi_synchronous=True)
