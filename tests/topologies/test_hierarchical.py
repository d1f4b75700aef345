"""The hierarchy on a loopback: what crosses which axis, who takes what, and that it is a mean over all."""

import pytest
import torch
from torch import Tensor

from cases import for_each
from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, Sign, TopK
from tacit.contracts import NET, NODE, AxisRank, Compressor
from tacit.errors import ConfigError, NonFinite
from tacit.session import Session
from tacit.strategy import Levels, Strategy
from tacit.topologies import Flat, Hierarchical
from tacit.topologies.schedules import by_levels, chunk_of
from tacit.transports.loopback import Loopback, LoopbackTransport

NAMED = {"a": torch.zeros(30, 10), "b": torch.zeros(10), "c": torch.zeros(41, 5), "d": torch.zeros(5)}
LOTS = [["d", "c"], ["b", "a"]]
SIZE = 520
WAYS = ["slices", "leaders"]
SHAPES = [(2, 2), (2, 3), (3, 2), (1, 3), (3, 1), (1, 1), (2, 4), (3, 6)]
PLACES = {4: (2, 2), 6: (2, 3)}
"""Ranks of a place -> its levels: ranks of a machine, machines."""


class Nodes:
    """Sessions of M nodes with G ranks each."""

    def __init__(self, compressor: Compressor, by: str, nodes: int = 2, ranks: int = 2) -> None:
        self.net = Loopback.of_nodes(nodes, ranks)
        topology = Hierarchical(by=by, near=PLACES.get(ranks, ()))  # type: ignore[arg-type]
        strategy = Strategy(compressor=compressor, topology=topology)
        self.sessions = [
            Session(strategy, NAMED, LoopbackTransport(self.net, rank), LOTS) for rank in range(nodes * ranks)
        ]

    def round(self, given: list[list[Tensor]]) -> list[list[Tensor]]:
        """The means, by bucket and rank; `given` is overwritten."""
        for bucket, xs in enumerate(given):
            outcomes = self.net.run([s.open(bucket, x) for s, x in zip(self.sessions, xs, strict=True)])
            for session, outcome in zip(self.sessions, outcomes, strict=True):
                session.complete(bucket, outcome)
        return given

    def tensors(self, seed: int) -> list[list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        sizes = [bucket.numel for bucket in self.sessions[0].buckets]
        return [[torch.randn(n, generator=generator) for _ in self.sessions] for n in sizes]


@for_each(("nodes", "ranks"), SHAPES)
@for_each("by", WAYS)
def test_a_dense_hierarchy_is_the_mean_of_all(by: str, nodes: int, ranks: int) -> None:
    group = Nodes(Dense(), by, nodes, ranks)
    given = group.tensors(1)
    expected = [torch.stack(xs).mean(0) for xs in given]
    for want, got in zip(expected, group.round(given), strict=True):
        for each in got:
            torch.testing.assert_close(each, want)
            assert torch.equal(each, got[0])


@for_each(("nodes", "ranks"), SHAPES)
@for_each("by", WAYS)
@for_each(
    "compressor",
    [ErrorFeedback(TopK(ratio=0.1)), ErrorFeedback(Sign()), ErrorFeedback(PowerSGD(rank=1)), BF16()],
    ids=["topk", "sign", "powersgd", "bf16"],
)
def test_all_ranks_agree_and_nothing_is_lost(compressor: Compressor, by: str, nodes: int, ranks: int) -> None:
    group = Nodes(compressor, by, nodes, ranks)
    sums = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
    told = {name: torch.zeros(p.numel()) for name, p in NAMED.items()}
    for seed in range(4):
        given = group.tensors(seed)
        for bucket, xs in zip(group.sessions[0].buckets, given, strict=True):
            for slot in bucket.slices:
                sums[slot.name] += torch.stack(xs).mean(0)[slot.start : slot.stop]
        for bucket, xs in zip(group.sessions[0].buckets, group.round(given), strict=True):
            assert all(torch.equal(x, xs[0]) for x in xs)
            for slot in bucket.slices:
                told[slot.name] += xs[0][slot.start : slot.stop]
    if isinstance(compressor, BF16):
        return
    # What a node still owes lies with its ranks, in stretches; the mean of the nodes is what all still owe.
    for session in group.sessions:
        for (name, field), kept in session.store.named_state().items():
            if field == "residual":
                told[name][kept.start : kept.start + kept.tensor.numel()] += kept.tensor / nodes
    for name in ("a", "c"):
        torch.testing.assert_close(told[name], sums[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_share_what_crosses_between_nodes(ranks: int) -> None:
    group = Nodes(Dense(), "slices", 2, ranks)
    far = [sum(cost.sent[NET] for cost in session.store.costs) for session in group.sessions]
    near = [sum(cost.sent[NODE] for cost in session.store.costs) for session in group.sessions]
    # On 2 nodes a node's link carries the whole tensor once each way, whatever the number of its ranks.
    assert sum(far[:ranks]) == 4 * SIZE
    assert max(far) - min(far) <= 4 * len(LOTS)
    # Inside: all stretches but its own away, and its own to all others; over all ranks 2 (G - 1) n.
    assert sum(near[:ranks]) == 2 * (ranks - 1) * 4 * SIZE


def test_what_leaves_a_machine_for_others_of_its_site_is_one_tensor_shared_by_its_ranks() -> None:
    down, up = by_levels(6, (2, 3))  # three machines of two ranks
    for schedule in (down, up):
        hops = [hop for turn in schedule.rounds for hop in turn]
        out = sum(hop.stop - hop.start for hop in hops if hop.source // 2 == 0 and hop.end // 2 != 0)
        assert out / schedule.chunks == pytest.approx(2 / 3), "(machines - 1) / machines"
    last = {hop.end: hop.start for turn in down.rounds for hop in turn}
    assert last == {rank: chunk_of(rank, (2, 3)) for rank in range(6)}


def test_levels_inside_a_site_are_of_as_many_ranks() -> None:
    with pytest.raises(ConfigError, match=r"Hierarchical\(near=\(2, 3\)\) is for 6 ranks, and there are 4"):
        Hierarchical(near=(2, 3)).spans(range(11), AxisRank(0, 4))
    with pytest.raises(ConfigError, match=r"near=\(0,\) cannot be: write \(8, 4\) for places of four"):
        Hierarchical(near=(0,))


def test_leaders_alone_speak_between_nodes() -> None:
    group = Nodes(ErrorFeedback(TopK(ratio=0.1)), "leaders")
    far = [sum(cost.sent[NET] for cost in session.store.costs) for session in group.sessions]
    assert far[0] == far[2] > 0
    assert far[1] == far[3] == 0
    assert [bool(session.store.named_state()) for session in group.sessions] == [True, False, True, False]


def test_the_loopback_sees_the_bytes_that_the_bills_foretell() -> None:
    for by in WAYS:
        group = Nodes(ErrorFeedback(TopK(ratio=0.1)), by)
        group.round(group.tensors(0))
        assert group.net.sent == [sum(sum(b.sent.values()) for b in s.store.costs) for s in group.sessions]


def test_slices_of_matrices_are_whole_parameters() -> None:
    group = Nodes(ErrorFeedback(PowerSGD(rank=1)), "slices", 2, 2)
    kept = [{name for name, _ in session.store.named_state()} for session in group.sessions[:2]]
    assert kept[0].isdisjoint(kept[1])
    assert kept[0] | kept[1] == {"a", "c"}


def test_slices_are_equal_as_far_as_edges_allow() -> None:
    slices = Hierarchical()
    assert slices.spans(range(11), AxisRank(0, 2)) == ((0, 5), (5, 10))
    assert slices.spans(range(12), AxisRank(0, 3)) == ((0, 4), (4, 7), (7, 11))
    assert slices.spans([0, 2, 9, 10], AxisRank(0, 2)) == ((0, 2), (2, 10))
    assert slices.spans([0, 10], AxisRank(0, 3)) == ((0, 0), (0, 10), (10, 10))
    assert Hierarchical(by="leaders").spans(range(11), AxisRank(1, 3)) == ((0, 10), (10, 10), (10, 10))


@pytest.mark.parametrize("by", WAYS)
@pytest.mark.parametrize("compressor", [Dense(), ErrorFeedback(TopK(ratio=0.1))], ids=["dense", "topk"])
def test_what_is_not_finite_is_an_error_on_every_rank(compressor: Compressor, by: str) -> None:
    for culprit in range(4):
        group = Nodes(compressor, by)
        xs = group.tensors(1)[1]
        xs[culprit][9] = torch.inf
        failures: list[str] = []

        def guarded(session: Session, x: Tensor, failures: list[str] = failures):
            try:
                yield from session.open(1, x)
            except NonFinite as error:
                failures.append(str(error))

        group.net.run([guarded(s, x) for s, x in zip(group.sessions, xs, strict=True)])
        assert len(failures) == 4
        assert all(f"b on rank {culprit}," in text for text in failures), failures


def test_levels_that_cannot_be_joined_are_refused() -> None:
    near = Strategy(topology=Flat(axis=NODE))
    with pytest.raises(ConfigError, match="the first exchanges the 'gradient'"):
        Levels((near, near))
    with pytest.raises(ConfigError, match="Did you mean 'slices'"):
        Hierarchical(by="slice")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown axis 'nodes'"):
        Flat(axis="nodes")


def test_a_farthest_level_that_reaches_not_all_is_refused() -> None:
    from tacit.merges import Average

    near = Strategy(topology=Flat(axis=NODE))
    with pytest.raises(ConfigError, match="would diverge"):
        Levels((near, Strategy(subject="delta", merge=Average(), topology=Flat(axis=NET))))
