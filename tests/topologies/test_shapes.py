"""All-reduces by schedules: each contribution counts once, and all ranks have the same bits."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import BF16, Dense, ErrorFeedback, Int8, PowerSGD, TopK
from tacit.contracts import AllGather, Context, Permute
from tacit.errors import ConfigError
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.testing import check_topology
from tacit.testing.exchanges import FreshBuffers
from tacit.topologies import (
    BlueConnect,
    Direct,
    DoubleTree,
    Flat,
    HalvingDoubling,
    Hierarchical,
    LinkTree,
    Ring,
    Torus,
    schedules,
)
from tacit.topologies.schedules import MessageSchedule
from tacit.topologies.shapes import Shape, Sums
from tacit.transports.loopback import Loopback, LoopbackTransport

SHAPES: tuple[Shape, ...] = (
    Ring(),
    HalvingDoubling(),
    DoubleTree(piece_bytes=64),
    Torus(),
    BlueConnect(),
    LinkTree(piece_bytes=64),
)
WORDS = ("ring", "halving-doubling", "double-tree", "torus", "blueconnect", "link-tree")
ALL: tuple[Sums, ...] = (*SHAPES, Direct())


def held(schedule: MessageSchedule) -> Tensor:
    """How often each rank's contribution is in each chunk of each rank, at the end."""
    counts = torch.zeros(schedule.peers, schedule.chunks, schedule.peers, dtype=torch.int64)
    for rank in range(schedule.peers):
        counts[rank, :, rank] = 1
    for hops in schedule.rounds:
        before = counts.clone()
        for hop in hops:
            there = counts[hop.end, hop.start : hop.stop]
            there *= hop.adds
            there += before[hop.source, hop.start : hop.stop]
    return counts


@pytest.mark.parametrize("peers", range(1, 18))
def test_every_rank_ends_with_the_sum_of_all_each_counted_once(peers: int) -> None:
    pieces = [schedules.double_tree(peers, count) for count in (1, 2, 5, 16)]
    made = [shape.schedule(peers, 1 << 20) for shape in SHAPES]
    torus = [schedules.torus(peers, (a, peers // a)) for a in range(1, peers + 1) if peers % a == 0]
    factors = [schedules.blueconnect(peers, each) for each in ((peers,), (1, peers), (peers, 1))]
    for schedule in [*made, *pieces, *torus, *factors]:
        for hops in schedule.rounds:
            for ends in ([hop.source for hop in hops], [hop.end for hop in hops]):
                assert len(ends) == len(set(ends)), "one message from each rank, one to each"
            assert all(0 <= hop.start < hop.stop <= schedule.chunks for hop in hops)
        assert bool((held(schedule) == 1).all())


def sent(schedule: MessageSchedule) -> tuple[int, list[float]]:
    """Rounds, and the share of a tensor that each rank sends."""
    shares = Counter[int]()
    for hops in schedule.rounds:
        for hop in hops:
            shares[hop.source] += hop.stop - hop.start
    return len(schedule.rounds), [shares[rank] / schedule.chunks for rank in range(schedule.peers)]


@pytest.mark.parametrize("peers", [2, 4, 8, 16])
def test_rounds_and_bytes_are_those_of_the_papers(peers: int) -> None:
    least, m = 2 * (peers - 1) / peers, peers.bit_length() - 1
    assert sent(schedules.ring(peers)) == (2 * (peers - 1), [least] * peers)
    assert sent(schedules.halving_doubling(peers)) == (2 * m, [least] * peers)
    rows, columns = schedules.found_sides(peers)
    assert sent(schedules.torus(peers)) == (2 * (rows - 1) + 2 * (columns - 1), [least] * peers)
    assert sent(schedules.blueconnect(peers)) == (2 * m, [least] * peers)
    for pieces in (1, 4, 16):
        rounds, shares = sent(schedules.double_tree(peers, pieces))
        assert max(shares) <= 2
        assert rounds <= 4 * pieces + 5 * m


def test_what_is_left_over_of_a_power_of_two_sends_half_and_gets_the_result() -> None:
    rounds, shares = sent(schedules.halving_doubling(6))
    assert rounds == 4 + 3
    assert shares == pytest.approx([0.5 + 1.5 + 1, 1, 0.5 + 1.5 + 1, 1, 1.5, 1.5])


def test_out_of_a_group_goes_what_the_level_above_exchanges() -> None:
    factors = (4, 3, 2)  # ranks of a node, nodes of a rack, racks
    out = Counter[int]()
    schedule = schedules.blueconnect(24, factors)
    for hops in schedule.rounds:
        for hop in hops:
            for level, group in enumerate((4, 12)):
                if hop.source // group == 0 and hop.end // group != 0:
                    out[level] += hop.stop - hop.start
    # Of the first node, to other nodes in its rack and beyond; of the first rack, to the other one.
    assert out[0] / schedule.chunks == pytest.approx(2 * 2 / 3 + 2 * 1 / 2 / 3)
    assert out[1] / schedule.chunks == pytest.approx(2 * 1 / 2)


def exchanged(shape: Sums, xs: list[Tensor], compressor: object = None) -> tuple[list[Tensor], list[int]]:
    """The means of all ranks, and the bytes that each has sent."""
    peers, net = len(xs), Loopback(len(xs))
    outs = [torch.full_like(x, torch.nan) for x in xs]
    exchanges = [
        shape.conduct(x, compressor or Dense(), {}, Context(out, FreshBuffers(), peers=peers, rank=rank))
        for rank, (x, out) in enumerate(zip(xs, outs, strict=True))
    ]
    net.run(exchanges)
    return outs, net.sent


@pytest.mark.parametrize("shape", ALL, ids=[*WORDS, "direct"])
@pytest.mark.parametrize("peers", range(1, 10))
def test_the_mean_is_in_the_same_bits_on_all_ranks(shape: Sums, peers: int) -> None:
    for numel in (1, 3, peers, 1000):
        xs = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(peers)]
        given = [x.clone() for x in xs]
        means, _ = exchanged(shape, xs)
        assert all(map(torch.equal, xs, given))
        assert all(torch.equal(mean, means[0]) for mean in means)
        assert torch.allclose(means[0].double(), torch.stack(xs).double().mean(0), atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=WORDS)
def test_sums_of_bf16_are_made_in_bf16(shape: Shape) -> None:
    xs = [torch.full((40,), 1.0 + rank / 8) for rank in range(4)]
    means, sizes = exchanged(shape, xs, BF16())
    assert torch.allclose(means[0], torch.full((40,), 1.1875), rtol=2**-7)
    assert sum(sizes) <= 4 * 2 * 40 * 2


def test_a_direct_sum_is_one_message_to_each_other_rank() -> None:
    xs = [torch.full((40,), 1.0 + rank / 8) for rank in range(4)]
    means, sizes = exchanged(Direct(), xs, BF16())
    assert torch.allclose(means[0], torch.full((40,), 1.1875), rtol=2**-7)
    assert sizes == [3 * 40 * 2] * 4


@pytest.mark.parametrize("shape", ALL, ids=[*WORDS, "direct"])
@pytest.mark.parametrize("peers", [2, 3, 4, 7])
def test_bytes_and_messages_are_foretold(shape: Sums, peers: int) -> None:
    named = {"w": torch.zeros(30, 20), "b": torch.zeros(7)}
    for compressor in (Dense(), BF16(), ErrorFeedback(PowerSGD(rank=1))):
        net = Loopback(peers)
        strategy = Strategy(compressor=compressor, topology=shape)
        sessions = [
            Session(strategy, named, LoopbackTransport(net, rank), [[*named]]) for rank in range(peers)
        ]
        xs = [torch.randn(607) for _ in range(peers)]
        net.run([session.open(0, x) for session, x in zip(sessions, xs, strict=True)])
        for rank, session in enumerate(sessions):
            (cost,) = session.store.costs
            assert net.sent[rank] == cost.sent.total()
            assert {each.kind for each in cost.messages} == {
                (AllGather if shape == Direct() else Permute).__name__
            }
            stages = 1 + len(cost.messages) if isinstance(shape, Direct) else 2
            assert session.store.stages == {"world": stages}, "of pairs, however many messages there are"


@pytest.mark.parametrize("shape", ALL, ids=[*WORDS, "direct"])
def test_the_laws(shape: Sums) -> None:
    checked = check_topology(shape, worlds=(1, 2, 3), dtypes=(torch.float32, torch.bfloat16))
    assert len(checked.accepted) == 3, "dense, bf16 and low rank"
    assert all("add up" in why and "topology=Flat()" in why for why in checked.refused.values())


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("dense:topology=direct", Direct()),
        ("dense:topology=ring", Ring()),
        ("bf16:topology=halving-doubling", HalvingDoubling()),
        ("fp16:topology=double-tree", DoubleTree()),
        ("powersgd:topology=torus", Torus()),
        ("dense:topology=torus-2x4", Torus(sides=(2, 4))),
        ("localsgd:topology=blueconnect-8x4x2", BlueConnect(factors=(8, 4, 2))),
        ("fusion:topology=blueconnect", BlueConnect()),
        ("dense:topology=all-reduce", Flat()),
        ("dense:topology=hierarchical", Hierarchical()),
        ("topk:topology=hierarchical", Hierarchical()),
    ],
)
def test_text(text: str, topology: object) -> None:
    (level,) = parse(text).levels
    assert level.topology == topology


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Torus(sides=(2, 3)).schedule(8, 1),
            r"sides=\(2, 3\)\) is for 6 ranks.*8: write sides=\(2, 4\)",
        ),
        (lambda: BlueConnect(factors=(2, 3)).schedule(9, 1), r"is for 6 ranks.*9: write factors=\(3, 3\)"),
        (lambda: Torus(sides=(2, 2, 2)), r"sides=\(2, 2, 2\) cannot be: write \(2, 4\)"),
        (lambda: Torus(sides=(0, 2)), r"sides=\(0, 2\) cannot be"),
        (lambda: Torus(sides=[2, 2]), r"sides=\[2, 2\] cannot be"),  # type: ignore[arg-type]
        (lambda: BlueConnect(factors=(2.0,)), r"factors=\(2.0,\) cannot be"),  # type: ignore[arg-type]
        (lambda: DoubleTree(piece_bytes=0), "piece_bytes=0"),
        (lambda: Ring().schedule(5000, 1), r"49990000 messages among 5000 ranks.*HalvingDoubling\(\)"),
        (lambda: Ring(axis="row"), "unknown axis 'row'"),
        (lambda: parse("dense:topology=torus-2"), "unknown topology 'torus-2'"),
        (lambda: parse(f"dense:topology=torus-2x{'9' * 5000}"), "unknown topology 'torus-2x999"),
        (lambda: parse("dense:topology=ring-2x2"), "unknown topology 'ring-2x2'"),
        (lambda: parse("dense:topology=torus-2x2x2"), r"sides=\(2, 2, 2\) cannot be"),
        (lambda: parse("topk:topology=ring"), "ring"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("compressor", [ErrorFeedback(TopK(ratio=0.1)), ErrorFeedback(Int8())])
def test_payloads_that_do_not_add_up_are_refused_by_name(compressor: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot travel by Ring.*do not add up: write topology=Flat\(\)"):
        Session(
            Strategy(compressor=compressor, topology=Ring()),  # type: ignore[arg-type]
            {"w": torch.zeros(30, 20)},
            LoopbackTransport(Loopback(2), 0),
            [["w"]],
        )


def test_a_session_says_which_numbers_fit() -> None:
    with pytest.raises(ConfigError, match=r"Torus\(sides=\(2, 3\)\) is for 6 ranks, and there are 4"):
        Session(
            Strategy(topology=Torus(sides=(2, 3))),
            {"w": torch.zeros(30, 20)},
            LoopbackTransport(Loopback(4), 0),
            [["w"]],
        )


def test_no_more_schedule_than_ranks_need() -> None:
    for peers in (33, 64, 100):
        rounds, _ = sent(schedules.double_tree(peers, 4))
        assert rounds <= 16 + 5 * math.ceil(math.log2(peers))
