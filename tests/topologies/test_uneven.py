"""Unequal stretches: the solver's laws, and means that are equal on all ranks whatever the stretches."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.algorithms import parse
from tacit.compressors import BF16, FP16, Dense, ErrorFeedback, PowerSGD, Sign, TopK
from tacit.contracts import NET, Compressor, LinkRates
from tacit.errors import ConfigError, NonFinite
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.testing import check_compressor
from tacit.topologies import Hierarchical, Uneven, uneven
from tacit.topologies.uneven import MOST_CHUNKS, chunks, cut, seconds
from tacit.transports.loopback import Loopback, LoopbackTransport

RATES = st.lists(st.floats(1e3, 1e11), min_size=1, max_size=9)


@given(st.integers(0, 10**9), RATES)
def test_stretches_cover_the_tensor_and_are_never_worse_than_equal_ones(
    numel: int, rates: list[float]
) -> None:
    spans, equal = cut(numel, rates), cut(numel, [1.0] * len(rates))
    assert (spans[0][0], spans[-1][1]) == (0, numel)
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    assert all(start <= stop for start, stop in spans)
    assert max(b - a for a, b in equal) - min(b - a for a, b in equal) <= 2
    assert seconds(spans, rates) <= seconds(equal, rates)


@given(st.integers(0, 1000), st.floats(1.0, 1e12), st.integers(1, 9))
def test_equal_rates_give_equal_stretches(numel: int, rate: float, peers: int) -> None:
    assert cut(numel, [rate] * peers) == cut(numel, [1.0] * peers)


@given(st.integers(0, 14), st.lists(st.integers(1, 12), min_size=1, max_size=4))
@settings(max_examples=60)
def test_no_other_stretches_are_better_but_for_rounding(numel: int, whole: list[int]) -> None:
    rates = [float(rate) for rate in whole]
    inner = combinations_with_replacement(range(numel + 1), len(rates) - 1)
    every = [tuple(zip((0, *ends), (*ends, numel), strict=True)) for ends in inner]
    best = min(seconds(spans, rates) for spans in every)
    assert seconds(cut(numel, rates), rates) <= best + 2 * len(rates) / min(rates) + 1e-9


@given(st.integers(1, 10**8), RATES.filter(lambda rates: len(rates) > 2))
def test_the_busiest_link_is_at_its_limit(numel: int, rates: list[float]) -> None:
    limit = numel * max(1 / min(rates), 2 * (len(rates) - 1) / sum(rates))
    assert seconds(cut(numel, rates), rates) <= 1.0000001 * limit + 2 * len(rates) / min(rates)


def test_a_slow_link_averages_for_nobody() -> None:
    spans = cut(9_000, [1e9, 1e9, 1e9, 1e8])
    assert spans == ((0, 3000), (3000, 6000), (6000, 9000), (9000, 9000))
    assert seconds(spans, [1e9, 1e9, 1e9, 1e8]) == 9_000 / 1e8  # a ring: 1.5 times as long
    assert cut(12, [1.0]) == ((0, 12),)


@given(st.integers(0, 10**10))
def test_chunks_are_few(nbytes: int) -> None:
    assert 1 <= chunks(nbytes) <= chunks(nbytes + 5000) <= MOST_CHUNKS


DENSE = Dense()


def averaged(
    given: list[torch.Tensor], topology: Uneven, compressor: Compressor = DENSE, rounds: int = 1
) -> tuple[list[torch.Tensor], list[int]]:
    """What each rank has after an exchange, and the bytes that each has sent."""
    net = Loopback(len(given))
    named = {"a": torch.zeros_like(given[0])}
    strategy = Strategy(compressor=compressor, topology=topology)
    sessions = [Session(strategy, named, LoopbackTransport(net, rank), [["a"]]) for rank in range(len(given))]
    for _ in range(rounds):
        xs = [x.clone() for x in given]
        done = net.run([s.open(0, x) for s, x in zip(sessions, xs, strict=True)])
        for session, outcome in zip(sessions, done, strict=True):
            session.complete(0, outcome)
    return xs, net.sent


@given(
    st.lists(st.floats(1e6, 1e10), min_size=1, max_size=6),
    st.integers(1, 700),
    st.sampled_from([Dense(), BF16(), FP16()]),
    st.integers(0, 2**31),
    st.sampled_from([16 << 10, 100, 1]),
)
@settings(max_examples=60, deadline=None)
def test_all_ranks_have_the_mean_in_equal_bits(
    rates: list[float], numel: int, compressor: Compressor, seed: int, chunk: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven, "CHUNK_BYTES", chunk)  # one chunk, or the most
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(numel, generator=generator) for _ in rates]
        xs, sent = averaged(given, Uneven(rates=tuple(rates)), compressor)
    mean = torch.stack([x.double() for x in given]).mean(0)
    assert all(torch.equal(x, xs[0]) for x in xs)
    width, tolerance = (4, 1e-6) if compressor == Dense() else (2, 0.03)
    assert torch.allclose(xs[0].double(), mean, atol=tolerance, rtol=tolerance)
    if len(rates) == 1:
        return
    flags = [2 * 8 * len(rates)] * len(rates)
    for (start, stop), each, flag in zip(cut(numel, rates), sent, flags, strict=True):
        payload = width * (numel + (len(rates) - 2) * (stop - start))
        assert payload <= each <= payload + flag


def test_one_rank_keeps_its_tensor() -> None:
    x = torch.randn(50)
    assert torch.equal(averaged([x], Uneven(rates=(1e9,)))[0][0], x)


def test_error_feedback_keeps_what_rounding_left_out() -> None:
    given = [torch.randn(300) for _ in range(4)]
    xs, _ = averaged(given, Uneven(rates=(4.0, 3.0, 2.0, 1.0)), ErrorFeedback(BF16()), rounds=5)
    assert all(torch.equal(x, xs[0]) for x in xs)


def test_the_laws_hold_for_what_it_takes() -> None:
    for compressor in (Dense(), BF16()):
        checked = check_compressor(compressor, topologies=[Uneven()], worlds=(1, 2, 3))
        assert checked.accepted
        assert not checked.refused


def test_a_nan_of_a_rank_that_owns_nothing_is_named() -> None:
    given = [torch.ones(40) for _ in range(4)]
    given[3][7] = float("nan")
    with pytest.raises(NonFinite, match="rank 3"):
        averaged(given, Uneven(rates=(1e9, 1e9, 1e9, 1e8)))


@pytest.mark.parametrize("compressor", [TopK(ratio=0.1), ErrorFeedback(Sign()), PowerSGD(rank=1)])
def test_what_cannot_be_cut_is_refused(compressor: Compressor) -> None:
    with pytest.raises(ConfigError, match=r"write Dense\(\) or BF16\(\), or topology=Auto\(\)"):
        Strategy(compressor=compressor, topology=Uneven())
    with pytest.raises(ConfigError, match="spans of its payload"):
        Session(
            Strategy(topology=Uneven()),
            {"a": torch.zeros(40, 40)},
            LoopbackTransport(Loopback(2), 0),
            [["a"]],
            lambda name, p: compressor,
        )


@pytest.mark.parametrize("rates", [(1e9, 0.0), (1e9, -1.0), (float("nan"),), [1e9], ("1gbit",), 5])
def test_rates_that_cannot_be_are_refused(rates: object) -> None:
    with pytest.raises(ConfigError, match="tuple of bit/s"):
        Uneven(rates=rates)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["1000/0", "fast", "1000//1000", "-1/1", "inf/1", "nan/1"])
def test_a_text_with_such_rates_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="rates=1000/1000/1000/100"):
        parse(f"uneven:rates={text}")


def test_the_text_form() -> None:
    assert parse("uneven") == Strategy(topology=Uneven())
    assert parse("uneven:rates=1000/100.5,compressor=bf16") == Strategy(
        compressor=BF16(), topology=Uneven(rates=(1e9, 100.5e6))
    )


def test_rates_for_other_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="has 2 rates, and there are 3 ranks"):
        averaged([torch.ones(5)] * 3, Uneven(rates=(1e9, 1e9)))


def test_measured_links_give_each_rank_its_share_of_its_node() -> None:
    fast, slow = 1e9, 1e8
    matrix = ((None, fast, slow), (0.9 * fast, None, slow), (slow, 0.5 * slow, None))
    links = LinkRates(matrix, ((0, 1), (2, 3), (4, 5)))
    assert links.of_nodes() == (0.9 * fast, 0.9 * fast, slow)
    assert Uneven().for_rates(links).rates == (4.5e8,) * 4 + (5e7,) * 2
    assert Uneven(NET).for_rates(links).rates == (9e8, 9e8, 1e8)
    assert Uneven().needs_rates
    assert not Uneven(rates=(1.0,)).needs_rates
    alone = Uneven().for_rates(LinkRates(((None,),), ((0, 1, 2),)))
    assert alone.rates == (alone.rates[0],) * 3


def test_it_goes_between_nodes_too() -> None:
    net, links = Loopback.of_nodes(3, 2), LinkRates(((None, 9.0, 1.0),) * 3, ((0, 1), (2, 3), (4, 5)))
    assert Hierarchical(far=Uneven(NET)).needs_rates
    assert not Hierarchical().needs_rates
    topology = Hierarchical(far=Uneven(NET)).for_rates(links)
    assert topology.far == Uneven(NET, links.of_nodes())
    strategy, named = Strategy(topology=topology), {"a": torch.zeros(200)}
    given = [torch.randn(200) for _ in range(6)]
    xs = [x.clone() for x in given]
    sessions = [Session(strategy, named, LoopbackTransport(net, rank), [["a"]]) for rank in range(6)]
    net.run([session.open(0, x) for session, x in zip(sessions, xs, strict=True)])
    assert all(torch.equal(x, xs[0]) for x in xs)
    assert torch.allclose(xs[0], torch.stack(given).mean(0), atol=1e-6)
