"""Gradient tracking: the papers' lines in plain tensors; replicas meet where gossip leaves them apart."""

import pytest
import torch
from mixed_replicas import N, assert_followed, assert_nan_named, assert_resumed, matrix, synced
from replica_threads import LR, Crew, gradient
from torch import Tensor

from tacit.algorithms import parse
from tacit.topologies import Gossip


def by_hand(topology: Gossip, peers: int, steps: int) -> Tensor:
    """y <- y + g - g of the step before; x <- W (x - lr y); y <- W y; [step, rank, entry]."""
    x = torch.ones(peers, N, dtype=torch.float64)
    y, before, trace = torch.zeros_like(x), torch.zeros_like(x), []
    for t in range(steps):
        g = torch.stack([gradient(each, i, t) for i, each in enumerate(x)])
        y, before = y + g - before, g
        w = matrix(topology, peers, t)
        x, y = w @ (x - LR * y), w @ y
        trace.append(x.clone())
    return torch.stack(trace)


@pytest.mark.parametrize(("graph", "peers"), [("ring", 4), ("exponential", 5), ("one-peer", 4), ("ring", 2)])
def test_replicas_take_the_papers_steps(graph: str, peers: int) -> None:
    (level,) = parse(f"gradient-tracking:graph={graph}").levels
    assert isinstance(level.topology, Gossip)
    replicas = Crew(level, peers=peers)
    want = by_hand(level.topology, peers, 12)
    assert_followed(replicas.train(12), [*want], atol=5e-6)
    assert torch.allclose(synced(replicas).double(), want[-1].mean(0), atol=5e-6), "and leaves their mean"
    for replica in replicas.replicas:
        assert not any(each.tensor.any() for each in replica.session.store.named_state().values())
    replicas.close()


def test_after_sync_trackers_begin_anew() -> None:
    replicas = Crew("gradient-tracking:graph=ring", peers=3)
    replicas.train(5)
    replicas.sync()
    x = replicas.replicas[0].flat.double().repeat(3, 1)
    trace, w = replicas.train(4), matrix(Gossip("ring"), 3)
    y, before = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(4):
        g = torch.stack([gradient(each, i, t + 5) for i, each in enumerate(x)])
        y, before = y + g - before, g
        x, y = w @ (x - LR * y), w @ y
        assert all(torch.allclose(trace[r][t].double(), x[r], atol=5e-6) for r in range(3)), t
    replicas.close()


def test_replicas_meet_where_those_of_gossip_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quadratic whose minimum is elsewhere for every rank, and does not move."""
    monkeypatch.setattr("replica_threads.gradient", lambda x, rank, step: gradient(x, rank, 0))

    def apart(text: str) -> float:
        crew = Crew(text, peers=6)
        last = torch.stack([each[-1] for each in crew.train(200)])
        crew.close()
        return float((last - last.mean(0)).abs().max())

    assert apart("gradient-tracking:graph=ring") < 1e-4
    assert apart("gossip:graph=ring") > 1e-2


def test_a_rank_sends_its_replica_and_its_tracker() -> None:
    replicas = Crew("gradient-tracking:graph=ring", peers=4)
    replicas.train(8)
    for replica in replicas.replicas:
        flags = 2 * 3 / 4 * 4 * 4 * len(replica.session.buckets)
        compared = 4 * 8 * 3 / 4  # in the first of the eight rounds, where they begin
        assert replica.session.stats.totals.bytes_out == 8 * (2 * 2 * 4 * N + flags) + compared
    replicas.close()


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    assert_resumed("gradient-tracking")


def test_a_replica_alone_takes_its_own_steps() -> None:
    alone = Crew("localsgd:sync_every=100", peers=1).train(6)
    assert torch.equal(Crew("gradient-tracking", peers=1).train(6)[0][-1], alone[0][-1])


def test_a_nan_is_told_on_all_ranks() -> None:
    assert_nan_named("gradient-tracking", peers=4)
