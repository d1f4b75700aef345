"""Lazily aggregated gradients on a small convex problem, against the paper's own algorithm."""

from typing import Literal

import pytest
import torch
from laws import Bench
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import LAG
from tacit.contracts import Compressor, Context, Matrix, State, Topology
from tacit.errors import ConfigError
from tacit.session import Session
from tacit.strategy import Strategy
from tacit.topologies import Flat, Hierarchical
from tacit.transports.loopback import Loopback, LoopbackTransport

SIZE, WORKERS, ROWS = 20, 4, 50


class Problem:
    """Least squares, worker by worker: L_m(theta) = |A_m theta - b_m|^2 / 2; the later, the steeper.

    Columns have scales from a tenth to one, as gradients that change slowly are what the method is for.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        like = {"generator": generator, "dtype": torch.float64}
        scales = torch.linspace(0.1, 1.0, SIZE, dtype=torch.float64)
        self.a = [(1.3**m) * torch.randn(ROWS, SIZE, **like) * scales for m in range(WORKERS)]
        self.b = [torch.randn(ROWS, **like) for _ in range(WORKERS)]
        whole = sum(a.T @ a for a in self.a)
        assert isinstance(whole, Tensor)
        self.step = 1 / float(torch.linalg.eigvalsh(whole).max())
        self.best = torch.linalg.solve(whole, sum(a.T @ b for a, b in zip(self.a, self.b, strict=True)))

    def gradient(self, m: int, theta: Tensor) -> Tensor:
        return self.a[m].T @ (self.a[m] @ theta - self.b[m])

    def loss(self, theta: Tensor) -> float:
        """What it is above the least there can be."""
        both = [zip(self.a, self.b, strict=True) for _ in range(2)]
        here, least = (
            sum(float((a @ point - b).square().sum()) / 2 for a, b in each)
            for each, point in zip(both, (theta, self.best), strict=True)
        )
        return here - least


def of_the_paper(
    problem: Problem, rounds: int, xi: float, window: int
) -> tuple[list[Tensor], list[list[bool]]]:
    """Algorithm 1 with rule (15a), in the paper's notation: the server adds up changes, and steps by a."""
    a, thetas = problem.step, [torch.zeros(SIZE, dtype=torch.float64)]
    last = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(WORKERS)]
    total, uploads = torch.zeros(SIZE, dtype=torch.float64), []
    for k in range(rounds):
        motion = sum(
            xi * float((thetas[k + 1 - d] - thetas[k - d]).square().sum())
            for d in range(1, window + 1)
            if k >= d
        )
        uploads.append([False] * WORKERS)
        for m in range(WORKERS):
            change = problem.gradient(m, thetas[k]) - last[m]
            if float(change.square().sum()) > motion / (a * WORKERS) ** 2:
                total, last[m] = total + change, last[m] + change
                uploads[k][m] = True
        thetas.append(thetas[k] - a * total)
    return thetas, uploads


class Ranks:
    """Replicas that step by the mean that the compressor gives them."""

    def __init__(self, problem: Problem, compressor: Compressor) -> None:
        self.problem, self.compressor, self.net = problem, compressor, Loopback(WORKERS)
        self.theta = torch.zeros(SIZE, dtype=torch.float64)
        self.states: list[State] = [compressor.init(self.theta) for _ in range(WORKERS)]

    def round(self) -> int:
        """Step once; the bytes that the first rank has sent."""
        before = self.net.sent[0]
        outs = [torch.empty_like(self.theta) for _ in range(WORKERS)]
        talks = [
            Flat().conduct(
                self.problem.gradient(m, self.theta),
                self.compressor,
                self.states[m],
                Context(out=outs[m], work=Bench(), peers=WORKERS, rank=m, name="bucket"),
            )
            for m in range(WORKERS)
        ]
        outcomes = self.net.run(talks)
        self.states = [outcome.state for outcome in outcomes]
        assert all(torch.equal(outcome.mean, outcomes[0].mean) for outcome in outcomes)
        self.theta = self.theta - WORKERS * self.problem.step * outcomes[0].mean  # lr of a mean
        return self.net.sent[0] - before


WHOLE = (Matrix(0, SIZE, 1),)
NOTICE, GRADIENT = 2 * 3 * 4 // 4, 2 * 3 * SIZE * 8 // 4
"""Bytes of an all-reduce among four: of one number in fp32, and of the gradient in fp64."""


@pytest.mark.parametrize(("xi", "window"), [(0.1, 10), (0.5, 1), (0.0, 3)])
def test_it_goes_the_papers_way(xi: float, window: int) -> None:
    problem = Problem()
    thetas, uploads = of_the_paper(problem, 60, xi, window)
    ranks = Ranks(problem, LAG(xi, window, WHOLE))
    for k in range(60):
        sent = ranks.round()
        assert sent == NOTICE + GRADIENT * any(uploads[k]), k
        torch.testing.assert_close(ranks.theta, thetas[k + 1], rtol=1e-9, atol=1e-12)
    if xi == 0:
        assert all(map(all, uploads))
    else:
        assert any(any(each) and not all(each) for each in uploads), "no round in which only some had news"


def test_rounds_are_skipped_and_it_converges_as_fast_as_gradient_descent() -> None:
    problem = Problem()
    lazy, eager = Ranks(problem, LAG(matrices=WHOLE)), Ranks(problem, LAG(xi=0.0, matrices=WHOLE))
    goal = 1e-6 * problem.loss(lazy.theta)
    costs = {}
    for name, ranks in (("lazy", lazy), ("eager", eager)):
        costs[name] = []
        while problem.loss(ranks.theta) > goal:
            costs[name].append(ranks.round())
            assert len(costs[name]) < 5000
    assert NOTICE in costs["lazy"]
    assert NOTICE not in costs["eager"]
    assert len(costs["lazy"]) < 1.5 * len(costs["eager"])
    assert sum(costs["lazy"]) < 0.75 * sum(costs["eager"])


NAMED = {"a": torch.zeros(4, 3), "b": torch.zeros(3), "c": torch.zeros(5, 2)}


class Sessions:
    """Sessions of all ranks of a loopback, with every parameter's gradient given."""

    def __init__(
        self, buckets: list[list[str]], net: Loopback | None = None, topology: Topology | None = None
    ) -> None:
        self.net = net or Loopback(2)
        strategy = Strategy(compressor=LAG(xi=0.5, window=2), topology=topology or Flat())
        self.each = [
            Session(strategy, NAMED, LoopbackTransport(self.net, rank), buckets)
            for rank in range(self.net.world)
        ]

    def round(self, by_rank: list[dict[str, float]]) -> dict[str, float]:
        """The first entry of every parameter's mean."""
        means = {}
        for i, bucket in enumerate(self.each[0].buckets):
            xs = [
                torch.cat([torch.full((s.stop - s.start,), g[s.name]) for s in bucket.slices])
                for g in by_rank
            ]
            outcomes = self.net.run([s.open(i, x) for s, x in zip(self.each, xs, strict=True)])
            for session, outcome in zip(self.each, outcomes, strict=True):
                session.complete(i, outcome)
            means |= {slot.name: float(xs[0][slot.start]) for slot in bucket.slices}
        return means


def test_what_is_counted_is_what_was_sent_lot_by_lot() -> None:
    group = Sessions([["c"], ["b", "a"]])
    assert group.round([{"a": 1.0, "b": 1.0, "c": 1.0}] * 2) == {"a": 1.0, "b": 1.0, "c": 1.0}
    # A little more of a and b on one rank is let pass; c is news of the other rank's.
    means = group.round([{"a": 1.01, "b": 1.01, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 3.0}])
    assert means == {"a": 1.0, "b": 1.0, "c": 2.0}
    group.round([{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1.0, "b": 1.0, "c": 3.0}])
    for rank, session in enumerate(group.each):
        counted = [record.bytes_out for record in session.stats.records]
        nonfinite_flags = 2 * 4  # one number a rank tells of a NaN
        assert counted == [
            2 * (4 + nonfinite_flags) + 4 * (12 + 3 + 10),
            2 * (4 + nonfinite_flags) + 4 * 10,
            2 * (4 + nonfinite_flags),
        ]
        assert session.metrics()["bytes_out"] == group.net.sent[rank] == sum(counted)
        assert sum(sum(cost.sent.values()) for cost in session.store.costs) == counted[0]


def test_norms_follow_their_parameters_into_other_lots() -> None:
    news = [{"a": 1.0, "b": 2.0, "c": 3.0}] * 2
    group, other = Sessions([["c"], ["b", "a"]]), Sessions([["c", "b", "a"]])
    group.round(news)
    other.round(news)
    for session in group.each:
        session.rebucket([["c", "b", "a"]])
    for mine, theirs in zip(group.each, other.each, strict=True):
        kept, expected = mine.store.named_state(), theirs.store.named_state()
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[key].tensor, expected[key].tensor) for key in kept)
        assert kept["a", "norms"].shared
        assert not kept["a", "held"].shared
    little = [{"a": 1.1, "b": 2.1, "c": 3.1}] * 2
    assert group.round(little) == other.round(little) == news[0]


@pytest.mark.parametrize("by", ["slices", "leaders"])
def test_between_nodes_it_is_the_nodes_means_that_stand(by: Literal["slices", "leaders"]) -> None:
    group = Sessions([["c"], ["b", "a"]], Loopback.of_nodes(2, 2), Hierarchical(by=by))
    # By node the means are 2 and 6; what two ranks of a node change against each other is no change.
    news = [{"a": v, "b": v, "c": v} for v in (1.0, 3.0, 5.0, 7.0)]
    assert group.round(news) == {"a": 4.0, "b": 4.0, "c": 4.0}
    news[0]["a"], news[1]["a"] = 2.0, 2.0
    assert group.round(news) == {"a": 4.0, "b": 4.0, "c": 4.0}
    news[3]["c"] = 27.0
    assert group.round(news) == {"a": 4.0, "b": 4.0, "c": 9.0}
    for rank, session in enumerate(group.each):
        first, second, third = (record.bytes_out for record in session.stats.records)
        assert second <= third <= first
        assert first + second + third == group.net.sent[rank]
    assert any(s.stats.records[1].bytes_out < s.stats.records[0].bytes_out for s in group.each)


@pytest.mark.parametrize("text", ["lag:xi=-0.1", "lag:xi=nan", "lag:xi=inf", "lag:window=0"])
def test_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"(xi|window)=.* is not a"):
        parse(text)
