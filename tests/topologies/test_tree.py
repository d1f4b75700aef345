"""Merging along a tree on a loopback: against a slow reference, to the entry and to the byte."""

from typing import TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import Peers, tensors
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.compressors import (
    BF16,
    Cascade,
    Clip,
    Dense,
    ErrorFeedback,
    MajoritySign,
    MomentumCorrection,
    PowerSGD,
    Scheduled,
    Sign,
    Threshold,
    TopK,
)
from tacit.contracts import WORLD, Compressor, Outcome
from tacit.errors import ConfigError
from tacit.kernels.payload_layout import position_bytes
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import GlobalTopK
from tacit.topologies.tree import reduce_steps, result_step
from tacit.transports.loopback import Loopback, LoopbackTransport

Entries: TypeAlias = dict[int, tuple[float, frozenset[int]]]
"""Position -> the value, and the ranks whose values are in it."""


# ---- the reference: dictionaries that know where every value comes from ---------------------------------


def largest(entries: Entries, k: int) -> Entries:
    least = sorted((abs(value) for value, _ in entries.values()), reverse=True)[:k][-1:]
    among = [i for i, (value, _) in entries.items() if abs(value) >= least[0]]
    kept = sorted(among, key=lambda i: (-abs(entries[i][0]), i))[:k]
    return {i: entries[i] for i in kept}


def merged(one: Entries, other: Entries, k: int) -> Entries:
    none = (0.0, frozenset[int]())
    return largest(
        {
            i: (one.get(i, none)[0] + other.get(i, none)[0], one.get(i, none)[1] | other.get(i, none)[1])
            for i in {*one, *other}
        },
        k,
    )


def reference(xs: list[Tensor], k: int) -> tuple[Tensor, list[Tensor]]:
    """The mean, and what each rank has sent."""
    owners = [frozenset({rank}) for rank in range(len(xs))]
    lists = [
        largest({i: (v, owner) for i, v in enumerate(x.tolist())}, k)
        for x, owner in zip(xs, owners, strict=True)
    ]
    core = 1 << len(xs).bit_length() - 1
    for i, other in enumerate(lists[core:]):
        lists[i] = merged(lists[i], other, k)
    del lists[core:]
    while len(lists) > 1:
        lists = [merged(*lists[i : i + 2], k) for i in range(0, len(lists), 2)]
    mean, sent = torch.zeros_like(xs[0]), [torch.zeros_like(x) for x in xs]
    for i, (value, ranks) in lists[0].items():
        mean[i] = value
        for rank in ranks:
            sent[rank][i] = xs[rank][i]
    return mean * (1 / len(xs)), sent


def exchange(xs: list[Tensor], ratio: float) -> list[Outcome]:
    return Peers(TopK(ratio=ratio), len(xs), xs[0].numel(), GlobalTopK()).exchange(xs)


# Whole numbers add up exactly in any order; few of them tie often, and cancel.
WHOLE = st.integers(-4, 4).map(float)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    peers=st.integers(1, 8),
    numel=st.integers(1, 40),
    ratio=st.sampled_from([0.01, 0.1, 0.3, 0.7, 1.0]),
)
def test_every_entry_is_where_the_reference_has_it(
    data: st.DataObject, peers: int, numel: int, ratio: float
) -> None:
    entries = st.lists(WHOLE, min_size=numel, max_size=numel)
    xs = [torch.tensor(data.draw(entries)) for _ in range(peers)]
    k = TopK(ratio=ratio).most(numel)
    mean, sent = reference(xs, k)
    for outcome, expected in zip(exchange(xs, ratio), sent, strict=True):
        assert torch.equal(outcome.mean, mean)
        assert torch.equal(outcome.sent.dense(mean), expected)


@for_each("peers", [2, 3, 4, 6, 7, 8])
@for_each(("numel", "ratio"), [(3000, 0.2), (3000, 0.02), (20_000, 0.0005), (9, 0.2)])
def test_positions_in_every_way_of_writing_them(peers: int, numel: int, ratio: float) -> None:
    xs = [torch.randint(-1000, 1000, (numel,)).float() for _ in range(peers)]
    mean, sent = reference(xs, TopK(ratio=ratio).most(numel))
    for outcome, expected in zip(exchange(xs, ratio), sent, strict=True):
        assert torch.equal(outcome.mean, mean)
        assert torch.equal(outcome.sent.dense(mean), expected)


def test_plain_torch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for peers in (3, 4):
        xs = tensors(peers, 2000)
        compiled = exchange(xs, 0.05)
        with monkeypatch.context() as patch:
            patch.setattr("tacit.kernels.dispatch.active_backend", lambda device="cpu": "torch")
            plain = exchange(xs, 0.05)
        for one, other in zip(compiled, plain, strict=True):
            assert torch.equal(one.mean, other.mean)
            assert torch.equal(one.sent.dense(one.mean), other.sent.dense(one.mean))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_travel_too(dtype: torch.dtype) -> None:
    xs = [x.to(dtype) for x in tensors(3, 500)]
    outcomes = exchange(xs, 0.1)
    sent = torch.stack([outcome.sent.dense(outcome.mean).double() for outcome in outcomes])
    error = (outcomes[0].mean.double() - sent.mean(0)).abs().max()
    assert float(error) <= 4 * torch.finfo(dtype).eps * float(sent.abs().max())
    assert all(torch.equal(outcomes[0].mean, other.mean) for other in outcomes)


# ---- what becomes of rejected entries -------------------------------------------------------------------


def test_what_was_rejected_and_comes_back_by_others_stays_owed() -> None:
    xs = [torch.zeros(8) for _ in range(4)]
    xs[0][0], xs[1][1], xs[2][0], xs[3][3] = 1.0, 2.0, 5.0, 1.0
    group = Peers(ErrorFeedback(TopK(ratio=0.125)), 4, 8, GlobalTopK())
    outcomes = group.exchange(xs)
    assert outcomes[0].mean.tolist() == [1.25, 0, 0, 0, 0, 0, 0, 0]
    sent = [outcome.sent.dense(xs[0]) for outcome in outcomes]
    assert [float(each.sum()) for each in sent] == [0.0, 0.0, 5.0, 0.0]
    residuals = [state["residual"] for state in group.states]
    assert all(
        torch.equal(s + new_residual, x) for s, new_residual, x in zip(sent, residuals, xs, strict=True)
    )
    # And it comes next time, though nothing new is there.
    second = group.exchange([torch.zeros(8) for _ in xs])[0].mean
    assert second.tolist() == [0, 0.5, 0, 0, 0, 0, 0, 0]


@for_each("peers", [2, 3, 5, 6, 8])
def test_nothing_is_lost_in_many_rounds_and_all_of_it_comes(peers: int) -> None:
    group = Peers(ErrorFeedback(TopK(ratio=0.05)), peers, 400, GlobalTopK())
    given, applied = torch.zeros(400), torch.zeros(400)
    for seed in range(200):
        # Of one sign: what two ranks owe that cancels is rejected again and again, and owed by both for ever.
        xs = [x.abs().round() if seed < 20 else torch.zeros(400) for x in tensors(peers, 400, seed)]
        given += torch.stack(xs).sum(0)
        applied += (group.exchange(xs)[0].mean * peers).round()
        new_residual = torch.stack([state["residual"] for state in group.states])
        assert torch.equal(applied + new_residual.sum(0), given)
    assert not new_residual.any()


def test_momentum_is_forgotten_only_where_entries_arrived() -> None:
    xs = [torch.zeros(8), torch.zeros(8)]
    xs[0][2], xs[1][5] = 1.0, 3.0
    group = Peers(MomentumCorrection(ErrorFeedback(TopK(ratio=0.125))), 2, 8, GlobalTopK())
    group.exchange(xs)
    assert [state["velocity"].tolist().index(1.0) for state in group.states[:1]] == [2]
    assert not group.states[1]["velocity"].any()
    assert float(group.states[0]["inner.residual"][2]) == 1.0


# ---- who meets whom, and what it costs ------------------------------------------------------------------


@for_each("peers", range(1, 20))
def test_everybody_hears_of_everybody_once(peers: int) -> None:
    heard = [{rank} for rank in range(peers)]
    for ends in reduce_steps(peers):
        assert all(ends[end] == rank for rank, end in enumerate(ends) if end is not None)
        pairs = [(heard[rank], heard[end]) for rank, end in enumerate(ends) if end is not None]
        assert all(not one & other for one, other in pairs)
        heard = [heard[i] if end is None else heard[i] | heard[end] for i, end in enumerate(ends)]
    for rank, end in enumerate(result_step(peers)):
        if end is not None:
            heard[end] = heard[rank]
    assert heard == [set(range(peers))] * peers
    assert len(reduce_steps(peers)) == (peers - 1).bit_length()


NAMED = {"w": torch.zeros(512, 40), "b": torch.zeros(40)}


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 5, 6, 7, 8, 12])
def test_the_bill_is_the_formula_and_what_is_sent(peers: int) -> None:
    net = Loopback(peers)
    sessions = [
        Session(parse("gtopk:ratio=0.01"), NAMED, LoopbackTransport(net, rank), [["w", "b"]])
        for rank in range(peers)
    ]
    k = 206  # of 20520
    payload, m = 4 * k + position_bytes(20_520, k), peers.bit_length() - 1
    # Biases, and a number for each rank that tells of a NaN, by a ring.
    beside = -(-2 * (peers - 1) * 4 * (40 + peers) // peers)
    for rank, session in enumerate(sessions):
        extra = rank >= 2**m
        helps = rank < peers - 2**m
        expected = beside + (1 if extra else m + 2 * helps) * payload + helps * -(-k // 8)
        assert session.store.costs[0].sent[WORLD] == expected
        assert session.store.stages == sessions[0].store.stages
    net.run([session.open(0, torch.randn(20_520)) for session in sessions])
    assert net.sent == [session.store.costs[0].sent[WORLD] for session in sessions]


# ---- what it is for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    [
        ErrorFeedback(TopK(ratio=0.1, values=BF16())),
        ErrorFeedback(Sign()),
        ErrorFeedback(Threshold(tau=1.0)),
        Cascade(TopK(ratio=0.1), Sign()),
        Scheduled(((3, ErrorFeedback(Sign())),), ErrorFeedback(TopK())),
    ],
)
def test_entries_that_do_not_arrive_as_they_are_are_refused(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match=r"does not send exact entries.*write TopK\(ratio"):
        Strategy(compressor=compressor, topology=GlobalTopK())


@pytest.mark.parametrize(
    "compressor", [Dense(), Clip(BF16(), 1.0), ErrorFeedback(PowerSGD()), MajoritySign()]
)
def test_where_there_is_nothing_to_merge_it_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match=r"GlobalTopK.*write.*TopK.*or topology=Flat\(\)"):
        Strategy(compressor=compressor, topology=GlobalTopK())


def test_a_policy_that_chooses_what_cannot_be_merged_is_refused() -> None:
    for chosen, fits in ((Dense(), True), (Sign(), False)):
        make = lambda chosen=chosen: Session(  # noqa: E731
            parse("gtopk"),
            NAMED,
            LoopbackTransport(Loopback(2), 0),
            [["w", "b"]],
            policy=lambda name, p: chosen,
        )
        if fits:
            make()
        else:
            with pytest.raises(ConfigError, match="does not send exact entries"):
                make()


def test_phases_that_speak_more_often_later_find_their_stages() -> None:
    compressor = Scheduled(((2, ErrorFeedback(Dense())),), ErrorFeedback(TopK(ratio=0.1)))
    session = Session(
        Strategy(compressor=compressor, topology=GlobalTopK()),
        NAMED,
        LoopbackTransport(Loopback(6), 0),
        [["w", "b"]],
    )
    # The biases with the word, and once more after a NaN; swaps need no stage.
    assert session.store.costs[0].stages[WORLD] == 1
    assert session.store.stages == {WORLD: 2}


def test_what_stands_beside_the_entries_goes_with_them() -> None:
    compressor = ErrorFeedback(Cascade(TopK(ratio=0.1), TopK(ratio=0.2)))
    group = Peers(compressor, 3, 200, GlobalTopK())
    given, arrived = torch.zeros(3, 200), torch.zeros(3, 200)
    for seed in range(5):
        xs = tensors(3, 200, seed)
        given += torch.stack(xs)
        arrived += torch.stack([o.sent.dense(o.mean) for o in group.exchange(xs)])
    residual = torch.stack([state["residual"] for state in group.states])
    torch.testing.assert_close(arrived + residual, given, rtol=1e-5, atol=1e-4)
