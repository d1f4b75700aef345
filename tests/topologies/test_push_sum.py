"""Push-sum on directed graphs: the paper's recursion, what is kept, and what no graph may be."""

import pytest
import replica_threads
import torch
from mixed_replicas import N, assert_followed, assert_nan_named, assert_resumed, synced
from replica_threads import LR, Crew, gradient
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import Dense, PublicCopy, PushSum, TopK
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import Mix
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Directed, Gossip

UNEVEN = ((0.5, 0.25, 0.0), (0.5, 0.25, 0.9), (0.0, 0.5, 0.1))
"""Column-stochastic: rank 1 gets more than it gives, and rank 2 hears of rank 0 by rank 1 alone."""


def pushing(topology: Directed, every: int = 1, late: int = 0) -> Strategy:
    return Strategy(
        subject="delta",
        rounds=Every(every),
        compressor=PushSum(),
        topology=topology,
        overlap=Delayed(late) if late else Bucketwise(),
        merge=Mix(),
    )


def by_hand(p: Tensor, steps: int, every: int = 1, late: bool = False) -> tuple[list[Tensor], Tensor]:
    """The paper's lines, of whole vectors: z of every step, and in the end the mean of all x."""
    peers = len(p)
    x, w = torch.ones(peers, N, dtype=torch.float64), torch.ones(peers, 1, dtype=torch.float64)
    z, way, trace = x.clone(), None, []
    for t in range(steps):
        step = -LR * torch.stack([gradient(each, i, t) for i, each in enumerate(z)])
        z, x = z + step, x + step
        if way is not None:  # what left a step ago; x has it, and the step since
            z, way = z + way, None
        if (t + 1) % every == 0:
            x, w = p @ x, p @ w
            if late:
                way = x / w - z
            else:
                z = x / w
        trace.append(z.clone())
    return trace, x.mean(0)


def topology(text: str) -> Directed:
    found = parse(text).levels[0].topology
    assert isinstance(found, Directed)
    return found


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("graph", ["one-way", "star", UNEVEN])
@pytest.mark.parametrize("peers", [2, 3, 4, 5])
def test_replicas_take_the_papers_steps(graph: object, peers: int, late: int) -> None:
    if isinstance(graph, tuple) and peers != 3:
        with pytest.raises(ConfigError, match=f"has 3 rows, and there are {peers} ranks"):
            Directed(graph).rows(peers)
        return
    directed = Directed(graph)  # type: ignore[arg-type]
    p = torch.tensor(directed.rows(peers), dtype=torch.float64)
    assert torch.allclose(p.sum(0), torch.ones(peers).double())
    every = 2 if peers == 4 else 1
    replicas = Crew(pushing(directed, every, late), peers=peers)
    want, mean = by_hand(p, 12, every, bool(late))
    assert_followed(replicas.train(12), want, atol=5e-6)
    found = synced(replicas)
    if every == 1:
        assert torch.allclose(found.double(), mean, atol=5e-6), "each counts by its weight"
    for replica in replicas.replicas:
        for (_, field), kept in replica.session.store.named_state().items():
            assert bool((kept.tensor == (1 if field == "weight" else 0)).all()), "weights begin anew"
    replicas.close()


def test_weights_are_those_of_the_matrix_and_add_up_to_the_ranks() -> None:
    replicas = Crew(pushing(Directed("star")), peers=4)
    replicas.train(5)
    weights = torch.ones(4, dtype=torch.float64)
    for _ in range(5):
        weights = torch.tensor(Directed("star").rows(4), dtype=torch.float64) @ weights
    for rank, replica in enumerate(replicas.replicas):
        kept = replica.session.store.named_state()
        assert [*kept["a", "weight"].tensor.shape] == [1]
        assert float(kept["a", "weight"].tensor) == pytest.approx(float(weights[rank]), abs=1e-6)
    assert float(weights.sum()) == pytest.approx(4)
    assert float(weights.max()) > 1.5, "rank 0 gets more than it gives"
    replicas.close()


def test_the_minimum_of_the_mean_is_found_although_ranks_have_other_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the weights it would be the minimum of a mean in which rank 0 counts for more."""
    monkeypatch.setattr(replica_threads, "gradient", lambda x, rank, _: x - float(rank == 0))
    monkeypatch.setattr(replica_threads, "LR", 0.02)
    replicas = Crew(pushing(Directed("star")), peers=4)
    replicas.train(250)
    replicas.sync()
    assert replicas.replicas[0].flat == pytest.approx(torch.full((N,), 0.25), abs=0.02)
    replicas.close()


def test_on_the_one_peer_graph_sgp_is_as_it_was() -> None:
    assert parse("sgp") == Strategy(
        subject="delta", rounds=Every(1), topology=Gossip("one-peer"), merge=Mix(), buffers="on_sync"
    )
    assert topology("sgp:graph=star,late=1") == Directed("star")
    assert parse("sgp:graph=star").levels[0].compressor == PushSum()


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    for text in ("sgp:graph=star", "sgp:graph=star,late=1"):
        assert_resumed(text)


def test_a_nan_is_told_on_all_ranks() -> None:
    assert_nan_named("sgp:graph=one-way", peers=5)


@pytest.mark.parametrize(
    ("graph", "says"),
    [
        (((0.5, 0.5), (0.4, 0.5)), r"not column-stochastic: column 0 adds up to 0\.9"),
        (((1.0, 0.0), (0.0, 1.0)), "nothing of rank 0 ever comes to rank 1"),
        (((0.5, 0.0), (0.5, 1.0)), "nothing of rank 1 ever comes to rank 0"),
        (((0.0, 1.0), (1.0, 0.0)), "gives away all that rank 0 has"),
        (((0.5, 0.5),), "no square matrix"),
        ([[1.0]], "no square matrix"),
        ("ring", "unknown graph 'ring'"),
    ],
)
def test_graphs_that_cannot_be(graph: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Directed(graph)  # type: ignore[arg-type]


@pytest.mark.parametrize("compressor", [Dense(), TopK(), PublicCopy(TopK())])
def test_what_has_no_weight_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match=r"write compressor=PushSum\(\), or topology=Gossip\(\)"):
        Strategy(subject="delta", compressor=compressor, topology=Directed(), merge=Mix())
