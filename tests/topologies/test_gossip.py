"""Neighbours that average: who sends to whom, that the mean stays, and that replicas come together."""

import pytest
import torch
from mixed_replicas import N, assert_followed, assert_nan_named, assert_resumed, matrix, mixed_by_hand, synced
from replica_threads import Crew

from tacit.algorithms import parse
from tacit.compressors import BF16, Dense, ErrorFeedback, TopK
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import Average, Mix
from tacit.strategy import Levels, Strategy
from tacit.topologies import Flat, Gossip

GRAPHS = ("ring", "exponential", "one-peer", "complete")
UNEVEN = ((0.5, 0.5, 0.0), (0.25, 0.25, 0.5), (0.25, 0.25, 0.5))


@pytest.mark.parametrize("graph", [*GRAPHS, UNEVEN])
@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5, 8, 16])
def test_every_matrix_is_doubly_stochastic_and_a_neighbour_costs_one_message(
    graph: object, peers: int
) -> None:
    if isinstance(graph, tuple) and peers != 3:
        with pytest.raises(ConfigError, match=rf"has 3 rows, and there are {peers} ranks"):
            Gossip(graph).rows(peers, 0)
        return
    for round_index in range(5):
        w = matrix(Gossip(graph), peers, round_index)  # type: ignore[arg-type]
        assert torch.allclose(w.sum(0), torch.ones(peers).double())
        assert torch.allclose(w.sum(1), torch.ones(peers).double())
        neighbours = int((w[0] > 0).sum()) - 1
        known = {"one-peer": min(1, peers - 1), "complete": peers - 1, "ring": min(2, peers - 1)}
        if graph in known:
            assert neighbours == known[graph]  # type: ignore[index]
        if graph == "exponential":
            assert neighbours == (peers - 1).bit_length()


@pytest.mark.parametrize("peers", [2, 4, 8])
def test_one_peer_after_another_is_the_mean_where_ranks_are_a_power_of_two(peers: int) -> None:
    w = torch.eye(peers).double()
    for round_index in range(peers.bit_length() - 1):
        w = matrix(Gossip("one-peer"), peers, round_index) @ w
    assert torch.allclose(w, torch.full((peers, peers), 1 / peers).double())


@pytest.mark.parametrize("peers", [2, 3, 5])
@pytest.mark.parametrize(
    "text",
    [
        "gossip",
        "gossip:graph=ring",
        "gossip:graph=complete,sync_every=3",
        "gossip:late=1",
        "sgp",
        "sgp:sync_every=2,late=1",
        "gossip-pga:global_every=3",
    ],
)
def test_replicas_take_the_papers_steps(text: str, peers: int) -> None:
    strategy = parse(text)
    (level,) = strategy.levels
    assert isinstance(level.topology, Gossip)
    late = int(level.overlap.apply_at(0))
    crew = Crew(strategy, peers=peers)
    want = mixed_by_hand(level.topology, peers, 12, level.rounds.sync_every, late)  # type: ignore[attr-defined]
    assert_followed(crew.train(12), want, atol=2e-6)
    mean, found = torch.stack(want[-1]).mean(0), synced(crew)
    if not late:
        assert torch.allclose(found.double(), mean, atol=2e-6), "and leaves their mean"
    crew.close()


@pytest.mark.parametrize(("text", "neighbours"), [("gossip:graph=ring", 2), ("gossip", 3), ("sgp", 1)])
def test_a_rank_sends_to_its_neighbours_alone_however_many_ranks_there_are(
    text: str, neighbours: int
) -> None:
    crew = Crew(text, peers=8)
    crew.train(4)
    for replica in crew.replicas:
        sent = replica.session.stats.totals.bytes_out / 4
        flags = 2 * 7 / 8 * 4 * 8 * len(replica.session.buckets)
        compared = 8 * 7 / 4  # in the first of the four rounds, where they begin
        assert sent == neighbours * 4 * N + flags + compared


def test_a_matrix_of_ones_own() -> None:
    strategy = Strategy(subject="delta", topology=Gossip(UNEVEN), merge=Mix())
    trace, want = Crew(strategy).train(8), mixed_by_hand(Gossip(UNEVEN), 3, 8)
    assert all(torch.allclose(trace[r][7].double(), want[7][r], atol=2e-6) for r in range(3))


def test_all_to_all_is_local_sgd() -> None:
    mixed = Crew("gossip:graph=complete,sync_every=2", peers=4).train(8)
    averaged = Crew("localsgd:sync_every=2", peers=4).train(8)
    for one, other in zip(mixed, averaged, strict=True):
        assert torch.allclose(one[-1], other[-1], atol=2e-6)


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    for text in ("sgp", "gossip:late=1", "gossip-pga:global_every=4"):
        assert_resumed(text)


def test_a_nan_is_told_on_all_ranks_and_not_only_next_to_it() -> None:
    assert_nan_named("sgp", peers=8)


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (((0.5, 0.5), (0.4, 0.6)), "column 0 adds up to 0.9"),
        (((0.5, 0.4), (0.5, 0.6)), "row 0 adds up to 0.9"),
        (((1.0, 0.0), (0.0, 1.0)), "not connected: nothing of rank 0 ever comes to rank 1"),
        (((0.5, 0.5),), "no square matrix"),
        (((1.5, -0.5), (-0.5, 1.5)), "no square matrix"),
        ("star", "unknown graph 'star'"),
    ],
)
def test_graphs_that_cannot_be(graph: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Gossip(graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("compressor", [TopK(), ErrorFeedback(TopK()), ErrorFeedback(BF16())])
def test_what_would_be_lost_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match="would lose what it does not send"):
        Strategy(subject="delta", compressor=compressor, topology=Gossip(), merge=Mix())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write merge=Mix\(\)"):
        Strategy(subject="delta", topology=Gossip(), merge=Average())
    with pytest.raises(ConfigError, match=r"topology=Gossip\(\)"):
        Strategy(subject="delta", topology=Flat(), merge=Mix())
    with pytest.raises(ConfigError, match="drift apart"):
        Strategy(topology=Gossip())
    mixing = Strategy(subject="delta", topology=Gossip(), merge=Mix())
    with pytest.raises(ConfigError, match="cannot be one of several levels"):
        Levels((Strategy(), mixing))
    assert Strategy(subject="delta", compressor=Dense(), topology=Gossip(), merge=Mix()) == mixing
