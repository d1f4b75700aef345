"""Compressed gossip: the papers' recursions over plain tensors, and that replicas come together."""

from collections.abc import Callable
from typing import ClassVar

import pytest
import replica_threads
import torch
from mixed_replicas import N, assert_followed, assert_nan_named, assert_resumed, matrix, synced
from replica_threads import LR, SIZES, Crew, gradient
from torch import Tensor

from tacit.algorithms import choco, parse
from tacit.compressors import (
    QSGD,
    Blockwise,
    Dense,
    DifferenceCopy,
    EntropyCoded,
    ErrorFeedback,
    Int8,
    MajoritySign,
    PowerSGD,
    PublicCopy,
    RandomK,
    Sign,
    Squeezed,
    TopK,
)
from tacit.contracts import Compressor
from tacit.errors import ConfigError
from tacit.merges import Average, Mix
from tacit.strategy import Strategy
from tacit.topologies import Flat, Gossip

UNEVEN = ((0.5, 0.5, 0.0), (0.25, 0.25, 0.5), (0.25, 0.25, 0.5))
BIG = {"a": 640, "b": 360}
"""Entries of two buckets: 1 % of them are 7 and 4."""


def buckets(of: Crew) -> list[list[int]]:
    """Where the entries of each bucket lie in a replica."""
    at, spans = 0, {}
    for name, size in SIZES.items():
        spans[name] = [*range(at, at + size)]
        at += size
    return [
        [e for param in bucket.slices for e in spans[param.name]] for bucket in of.replicas[0].session.buckets
    ]


def topk(x: Tensor, ratio: float, rows: list[list[int]]) -> Tensor:
    """The largest of each bucket's entries."""
    out = torch.zeros_like(x)
    for row in rows:
        part = x[row]
        kept = part.abs().topk(max(1, -(-int(ratio * 1000) * len(row) // 1000))).indices
        out[torch.tensor(row)[kept]] = part[kept]
    return out


def choco_by_hand(
    w: Tensor,
    steps: int,
    ratio: float,
    gamma: float,
    rows: list[list[int]],
    late: bool = False,
    every: int = 1,
) -> list[Tensor]:
    """The paper's lines, with a copy of every replica at hand."""
    peers = len(w)
    x = torch.ones(peers, N, dtype=torch.float64)
    public, way, trace = x.clone(), None, []
    for t in range(steps):
        x = torch.stack([each - LR * gradient(each, i, t) for i, each in enumerate(x)])
        if way is not None:
            x, way = x + way, None
        if (t + 1) % every == 0:
            public = public + torch.stack([topk(a - b, ratio, rows) for a, b in zip(x, public, strict=True)])
            move = gamma * (w @ public - public)
            if late:
                way = move
            else:
                x = x + move
        trace.append(x)
    return trace


@pytest.mark.parametrize("peers", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "text",
    [
        "choco:ratio=0.3,gamma=0.4",
        "choco:ratio=0.3,gamma=0.4,late=1",
        "choco:ratio=0.5,gamma=0.3,graph=exponential,sync_every=2",
    ],
)
def test_replicas_take_the_papers_steps(text: str, peers: int) -> None:
    strategy = parse(text)
    (level,) = strategy.levels
    sender, topology = level.compressor, level.topology
    assert isinstance(sender, PublicCopy)
    assert isinstance(sender.inner, TopK)
    assert isinstance(topology, Gossip)
    replicas = Crew(strategy, peers=peers)
    rows, w = buckets(replicas), matrix(topology, peers)
    late = level.overlap.apply_at(0) == 1
    every = level.rounds.sync_every  # type: ignore[attr-defined]
    want = choco_by_hand(w, 12, sender.inner.ratio, sender.gamma, rows, late, every)
    assert_followed(replicas.train(12), want, atol=3e-6)
    found = synced(replicas)
    if not late:
        assert torch.allclose(found.double(), want[-1].mean(0), atol=3e-6), "and leaves their mean"
    for replica in replicas.replicas:
        for (_, field), kept in replica.session.store.named_state().items():
            assert not kept.tensor.any(), f"{field} is at the anchor, as the replicas are"
    replicas.close()


class Unbiased(TopK):
    """Top-k that says it is right in the mean, so that what is lost can be worked out."""

    unbiased: ClassVar[bool] = True


def dcd_by_hand(w: Tensor, steps: int, rows: list[list[int]]) -> list[Tensor]:
    x, trace = torch.ones(len(w), N, dtype=torch.float64), []
    for t in range(steps):
        half = w @ x - LR * torch.stack([gradient(each, i, t) for i, each in enumerate(x)])
        x = x + torch.stack([topk(z, 0.3, rows) for z in half - x])
        trace.append(x)
    return trace


def squeezed_by_hand(w: Tensor, steps: int, rows: list[list[int]]) -> list[Tensor]:
    x, trace = torch.ones(len(w), N, dtype=torch.float64), []
    error = torch.zeros_like(x)
    for t in range(steps):
        x = x - LR * torch.stack([gradient(each, i, t) for i, each in enumerate(x)])
        v = x - 1 + error
        sent = torch.stack([topk(each, 0.3, rows) for each in v])
        error, x = v - sent, x + 0.4 * (w @ sent - sent)
        trace.append(x)
    return trace


@pytest.mark.parametrize("peers", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("sender", "by_hand"),
    [
        (DifferenceCopy(Unbiased(ratio=0.3)), dcd_by_hand),
        (Squeezed(TopK(ratio=0.3), 0.4), squeezed_by_hand),
    ],
)
def test_the_others_take_their_papers_steps(
    sender: Compressor, by_hand: Callable[[Tensor, int, list[list[int]]], list[Tensor]], peers: int
) -> None:
    replicas = Crew(
        Strategy(subject="delta", compressor=sender, topology=Gossip("ring"), merge=Mix()), peers=peers
    )
    want = by_hand(matrix(Gossip("ring"), peers), 12, buckets(replicas))
    assert_followed(replicas.train(12), want, atol=3e-6)
    assert torch.allclose(synced(replicas).double(), want[-1].mean(0), atol=3e-6)
    assert not any(
        kept.tensor.any() for each in replicas.replicas for kept in each.session.store.named_state().values()
    )
    replicas.close()


def test_dcd_that_loses_nothing_mixes_beside_the_step() -> None:
    """x <- W x - lr g, D-PSGD as it is in its paper."""
    replicas = Crew(
        Strategy(subject="delta", compressor=DifferenceCopy(Dense()), topology=Gossip("ring"), merge=Mix())
    )
    w, x = matrix(Gossip("ring"), 3), torch.ones(3, N).double()
    trace = replicas.train(8)
    for t in range(8):
        x = w @ x - LR * torch.stack([gradient(each, i, t) for i, each in enumerate(x)])
        assert all(torch.allclose(trace[r][t].double(), x[r], atol=2e-6) for r in range(3))


def test_a_replica_alone_stays_as_it_is() -> None:
    alone, whole = Crew("localsgd:sync_every=100", peers=1).train(6), Crew("ddp", peers=1)
    whole.close()
    for text in ("choco:ratio=0.1", "dcd", "deepsqueeze"):
        replicas = Crew(text, peers=1)
        assert torch.equal(replicas.train(6)[0][-1], alone[0][-1]), text
        replicas.sync()
        assert torch.allclose(replicas.replicas[0].flat, alone[0][-1], atol=1e-6), text


def test_after_sync_it_goes_on_as_from_the_start() -> None:
    w = matrix(Gossip("ring"), 3)
    replicas = Crew("choco:ratio=0.3,gamma=0.4")
    replicas.train(7)
    replicas.sync()
    start, rows = replicas.replicas[0].flat.double(), buckets(replicas)
    x, public = start.repeat(3, 1), start.repeat(3, 1)
    trace = replicas.train(6)
    for t in range(7, 13):
        x = torch.stack([each - LR * gradient(each, i, t) for i, each in enumerate(x)])
        public = public + torch.stack([topk(a - b, 0.3, rows) for a, b in zip(x, public, strict=True)])
        x = x + 0.4 * (w @ public - public)
        assert all(torch.allclose(trace[r][t - 7].double(), x[r], atol=3e-6) for r in range(3)), t
    replicas.close()


def test_any_doubly_stochastic_matrix_will_do() -> None:
    strategy = Strategy(
        subject="delta", compressor=PublicCopy(TopK(ratio=0.3), 0.4), topology=Gossip(UNEVEN), merge=Mix()
    )
    replicas = Crew(strategy)
    want = choco_by_hand(torch.tensor(UNEVEN, dtype=torch.float64), 8, 0.3, 0.4, buckets(replicas))
    trace = replicas.train(8)
    assert all(torch.allclose(trace[r][7].double(), want[7][r], atol=3e-6) for r in range(3))
    replicas.close()


def test_what_loses_nothing_is_gossip() -> None:
    exact = Strategy(
        subject="delta", compressor=PublicCopy(Dense(), 1.0), topology=Gossip("exponential"), merge=Mix()
    )
    for one, other in zip(Crew(exact, peers=4).train(8), Crew("gossip", peers=4).train(8), strict=True):
        assert torch.allclose(one[-1], other[-1], atol=2e-6)


def distances(
    strategy: str | Strategy, monkeypatch: pytest.MonkeyPatch, steps: int = 120
) -> tuple[float, float]:
    """How far, on a quadratic, the mean is from the minimum, and replicas from their mean; by its norm."""
    monkeypatch.setattr(
        replica_threads, "gradient", lambda x, rank, _: x - torch.sin(torch.arange(len(x)) * (1.0 + rank))
    )
    monkeypatch.setattr(replica_threads, "LR", 0.05)
    replicas = Crew(strategy, peers=4, sizes=BIG)
    x = torch.stack([trace[-1] for trace in replicas.train(steps)])
    replicas.close()
    best = torch.stack([torch.sin(torch.arange(1000) * (1.0 + rank)) for rank in range(4)]).mean(0)
    mean, size = x.mean(0), best.norm()
    return float((mean - best).norm() / size), float((x - mean).norm() / size)


def test_one_per_cent_of_the_entries_brings_replicas_together(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = distances("localsgd:sync_every=1000", monkeypatch)[1]
    mean, spread = distances("choco:ratio=0.01", monkeypatch)
    assert mean < 0.01, "the mean goes to the minimum of the mean, whatever is sent"
    assert spread < 0.6 * apart
    assert distances("choco:ratio=0.01,gamma=0.5", monkeypatch)[1] > 1.3 * apart, "too large a gamma"


@pytest.mark.parametrize(
    "text", ["choco:codec=sign", "choco:codec=qsgd", "choco:codec=int8", "dcd:bits=4", "deepsqueeze"]
)
def test_other_codecs_bring_them_closer(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = distances("gossip:graph=ring", monkeypatch)[1]
    mean, spread = distances(text, monkeypatch)
    assert mean < 0.01
    assert spread < 8 * dense, "gamma is a half, and W moves them further"


def test_a_run_that_is_resumed_goes_on_bit_for_bit() -> None:
    for text in ("choco:ratio=0.3", "choco:ratio=0.3,late=1", "choco:codec=qsgd", "dcd", "deepsqueeze"):
        assert_resumed(text)


def test_other_ranks_begin_with_public_copies_at_the_anchor(caplog: pytest.LogCaptureFixture) -> None:
    from tacit.checkpoint.session_state import join_states

    first = Crew("choco:ratio=0.3", peers=4)
    first.train(5)
    saved = first.save()
    whole = join_states({k: v for k, v in each.items() if k != "parameters"} for each in saved)
    second = Crew("choco:ratio=0.3", peers=3)
    given = whole | {"parameters": saved[0]["parameters"]}
    second.each(lambda _, replica: replica.load(given))
    assert "what 4 ranks knew of each other's replicas (of 4 parameters) is of no use to 3" in caplog.text
    for replica in second.replicas:
        assert not any(kept.tensor.any() for kept in replica.session.store.named_state().values())
    second.train(3)
    synced(second)


def test_a_nan_is_told_on_all_ranks() -> None:
    assert_nan_named("choco:ratio=0.3", peers=5)


def test_a_rank_sends_what_its_codec_takes_to_each_neighbour() -> None:
    replicas = Crew("choco:ratio=0.01", peers=4, sizes=BIG)
    replicas.train(2)
    (sent,) = {replica.session.stats.totals.bytes_out / 2 for replica in replicas.replicas}
    assert sent < 2 * 10 * 8 + 200, "ten entries and their positions to both neighbours, and the flags"


@pytest.mark.parametrize(
    ("inner", "says"),
    [
        (PowerSGD(), "takes several messages"),
        (RandomK(), "takes several messages"),
        (ErrorFeedback(TopK()), "keeps a residual itself"),
        (PublicCopy(TopK()), "takes several messages"),
        (EntropyCoded(), "a message of a known length"),
        (MajoritySign(), "a vote"),
    ],
)
def test_codecs_that_cannot(inner: Compressor, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        PublicCopy(inner)


@pytest.mark.parametrize("gamma", [0.0, -0.1, 1.5, float("nan"), True, "0.1"])
def test_gammas_that_cannot_be(gamma: object) -> None:
    with pytest.raises(ConfigError, match=r"gamma=.* is not in \(0, 1\]: write 0.05 for top-k"):
        PublicCopy(TopK(), gamma)  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused() -> None:
    for graph, every, says in (
        ("one-peer", 0, 'write graph="ring"'),
        ("ring", 4, r"call session.sync\(\) for a mean of all"),
    ):
        with pytest.raises(ConfigError, match=says):
            Strategy(
                subject="delta",
                compressor=PublicCopy(TopK()),
                topology=Gossip(graph, every),  # type: ignore[arg-type]
                merge=Mix(),
            )
    for compressor in (PublicCopy(TopK()), ErrorFeedback(PublicCopy(TopK()))):
        with pytest.raises(ConfigError, match=r"topology=Gossip\(\), merge=Mix\(\)"):
            Strategy(subject="delta", compressor=compressor, topology=Flat(), merge=Average())
        with pytest.raises(ConfigError, match=r"topology=Gossip\(\), merge=Mix\(\)"):
            Strategy(compressor=compressor)
    with pytest.raises(ConfigError, match="unknown value of choco:graph 'one-peer'"):
        parse("choco:graph=one-peer")
    with pytest.raises(ConfigError, match=r"ratio=0\.1 is for codec='topk'"):
        choco(ratio=0.1, codec="sign")
    with pytest.raises(ConfigError, match=r"would be lost, and it is not right in the mean: write Diff"):
        DifferenceCopy(TopK())
    with pytest.raises(ConfigError, match="bits=2 is not a whole number, from 3 to 8"):
        parse("dcd:bits=2")
    with pytest.raises(ConfigError, match=r"gamma=0\.0 is not in \(0, 1\]"):
        parse("deepsqueeze:gamma=0")
    with pytest.raises(ConfigError, match=r"write compressor=Dense\(\)"):
        Strategy(subject="delta", compressor=ErrorFeedback(Sign()), topology=Gossip(), merge=Mix())
    assert PublicCopy(QSGD()).inner == QSGD()
    assert PublicCopy(Int8()).kept == ("public", "neighbours")
    assert PublicCopy(Blockwise(bits=3)).exempted() is not None
