"""Golden trajectories: each periodic algorithm against its paper's lines, written out over plain tensors."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replica_threads import LR, SIZES, Crew, gradient
from torch import Tensor

from cases import for_each
from tacit.algorithms import parse
from tacit.attaching import epoch_length
from tacit.compressors import Dense, ErrorFeedback, TopK
from tacit.contracts import Merge
from tacit.errors import AttachError, CheckpointError, ConfigError
from tacit.merges import Average, Elastic, LocalResidual, OuterStep, SlowMo
from tacit.overlap import Delayed
from tacit.prediction import PredictiveCoding
from tacit.prediction.extrapolation import Persistent
from tacit.replicas.fragments import fragments
from tacit.rounds import AdaComm, ByVariance, Every, OnPlateau
from tacit.session.buckets import group_names
from tacit.session.schedule import Schedule
from tacit.strategy import Strategy
from tacit.topologies import Flat

P, STEPS = 3, 26
Trace = list[list[Tensor]]


def start() -> list[Tensor]:
    return [torch.ones(sum(SIZES.values()), dtype=torch.float64) for _ in range(P)]


def stepped(x: list[Tensor], step: int) -> list[Tensor]:
    return [each - LR * gradient(each, rank, step) for rank, each in enumerate(x)]


def mean(x: list[Tensor]) -> Tensor:
    return torch.stack(x).mean(0)


def local_sgd(k: int) -> Trace:
    x, trace = start(), []
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            x = [mean(x)] * P
        trace.append(x)
    return trace


def rows() -> list[Tensor]:
    """Where the entries of each bucket lie, in the order in which they travel."""
    named, at, spans = {name: torch.ones(size) for name, size in SIZES.items()}, 0, {}
    for name, size in SIZES.items():
        spans[name] = torch.arange(at, at + size)
        at += size
    parts = fragments(named, 1)
    found = [bucket for part in parts for bucket in group_names(part, named, cap=40)]
    return [torch.cat([spans[name] for name in bucket]) for bucket in found]


def sparse(k: int, ratio: float, trust: float) -> Trace:
    """Each sends, of each bucket, the largest of its progress beyond `trust` times the last answer."""
    buckets = rows()
    x, trace = [each.clone() for each in start()], []
    common, answer = start()[0], torch.zeros_like(start()[0])
    for t in range(STEPS):
        x = [each.clone() for each in stepped(x, t)]
        if (t + 1) % k == 0:
            sent = [torch.zeros_like(common) for _ in x]
            for where in buckets:
                for mine, each in zip(sent, x, strict=True):
                    rest = (each - common - trust * answer)[where]
                    chosen = rest.abs().topk(math.ceil(ratio * len(where))).indices
                    mine[where[chosen]] = rest[chosen]
            unsent = [each - common - trust * answer - mine for each, mine in zip(x, sent, strict=True)]
            answer = trust * answer + mean(sent)
            common = common + answer
            x = [common + each for each in unsent]
        trace.append(x)
    return trace


def largest(k: int, chunk: int) -> Callable[[Tensor], Tensor]:
    """Of each chunk the k largest entries, among zeros."""

    def of(row: Tensor) -> Tensor:
        kept = []
        for piece in row.split(chunk):
            places = piece.abs().topk(min(k, len(piece))).indices
            kept.append(torch.zeros_like(piece).index_copy(0, places, piece[places]))
        return torch.cat(kept)

    return of


def two_means(row: Tensor) -> Tensor:
    """Signs, times the mean magnitude of those above the mean, or of the others, in bf16; zeros stay out."""
    sent = row != 0
    large = row.abs() > row[sent].abs().mean()
    low, high = (row[side & sent].abs().mean().bfloat16().double() for side in (~large, large))
    return torch.where(large, high, low) * row.sign()


def fed_back(k: int, decay: float, lr: float, momentum: float, *steps: Callable[[Tensor], Tensor]) -> Trace:
    """DiLoCo whose deltas are compressed, with what is left added to the next; SparseLoCo has momentum 0."""
    x, trace = start(), []
    e = [torch.zeros_like(each) for each in x]
    outer = torch.nn.Parameter(x[0].clone())
    sgd = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            e = [decay * rest + outer.detach() - each for rest, each in zip(e, x, strict=True)]
            sent = [each.clone() for each in e]
            for mine in sent:
                for where in rows():
                    for step in steps:
                        mine[where] = step(mine[where])
            e = [each - mine for each, mine in zip(e, sent, strict=True)]
            outer.grad = mean(sent)
            sgd.step()
            x = [outer.detach().clone()] * P
        trace.append(x)
    return trace


def one_round_late(k: int, lr: float, momentum: float) -> Trace:
    """DiLoCoX without compression: the outer step is by the deltas of the period before."""
    x, trace = start(), []
    outer = torch.nn.Parameter(x[0].clone())
    sgd = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=True)
    before: list[Tensor] | None = None
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            own = [each - outer.detach() for each in x]
            if before is not None:
                own = [each - mine for each, mine in zip(own, before, strict=True)]
                outer.grad = -mean(before)
                sgd.step()
                x = [outer.detach() + each for each in own]
            before = own
        trace.append(x)
    return trace


def eager(k: int, lr: float, momentum: float) -> Trace:
    """Each steps by the mean of the period before, and by its part of the next one; what is sent is whole."""
    x, trace = start(), []
    outer = torch.nn.Parameter(x[0].clone())
    sgd = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=momentum > 0)
    begun, before = x, None
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            own = [each - first for each, first in zip(x, begun, strict=True)]
            if before is not None:
                outer.grad = -mean(before)
                sgd.step()
                x = [outer.detach() + lr * (1 + momentum) / P * each for each in own]
            begun, before = x, own
        trace.append(x)
    return trace


def easgd(k: int, beta: float) -> Trace:
    x, centre, trace = start(), start()[0], []
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            apart = [each - centre for each in x]
            x = [each - beta / P * d for each, d in zip(x, apart, strict=True)]
            centre = centre + beta / P * sum(apart)
        trace.append(x)
    return trace


def slowmo(k: int, alpha: float, beta: float) -> Trace:
    x, trace = start(), []
    outer, u = x[0], torch.zeros_like(x[0])
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            u = beta * u + (outer - mean(x)) / LR
            outer = outer - alpha * LR * u
            x = [outer] * P
        trace.append(x)
    return trace


def diloco(k: int, lr: float, momentum: float) -> Trace:
    """With torch's own SGD as the outer optimizer."""
    x, trace = start(), []
    outer = torch.nn.Parameter(x[0].clone())
    sgd = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=True)
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            outer.grad = outer.detach() - mean(x)
            sgd.step()
            x = [outer.detach().clone()] * P
        trace.append(x)
    return trace


def overlapped(k: int, alpha: float, beta: float) -> Trace:
    x, trace = start(), []
    z, v = x[0], torch.zeros_like(x[0])
    coming: Tensor | None = None
    for t in range(STEPS):
        x = stepped(x, t)
        if (t + 1) % k == 0:
            if coming is not None:
                v = beta * v + (coming - z)
                z = z + v
                x = [each - alpha * (each - z) for each in x]
            coming = mean(x)
        trace.append(x)
    return trace


def late_average(k: int, lag: int) -> Trace:
    """CoCoD-SGD; with k = lag = 1, OD-SGD."""
    x, trace = start(), []
    pending_rounds: list[tuple[int, list[Tensor]]] = []
    for t in range(STEPS):
        x = stepped(x, t)
        while pending_rounds and pending_rounds[0][0] + lag <= t:
            _, then = pending_rounds.pop(0)
            x = [now + mean(then) - mine for now, mine in zip(x, then, strict=True)]
        if (t + 1) % k == 0:
            pending_rounds.append((t, x))
        trace.append(x)
    return trace


def streaming(k: int, parts: int, lag: int, alpha: float, lr: float, momentum: float) -> Trace:
    """Fragments are the tail of the vector first, as parameters are taken from the last on."""
    from tacit.replicas.fragments import fragments

    named = {name: torch.empty(size) for name, size in SIZES.items()}
    at, spans = 0, {}
    for name, size in SIZES.items():
        spans[name] = torch.arange(at, at + size)
        at += size
    places = [torch.cat([spans[name] for name in part]) for part in fragments(named, parts)]
    x, trace = [each.clone() for each in start()], []
    outer, v = start()[0], torch.zeros_like(start()[0])
    pending_rounds: list[tuple[int, int, Tensor]] = []

    def land(x: list[Tensor], t: int) -> None:
        while pending_rounds and pending_rounds[0][0] + lag <= t:
            _, part, average = pending_rounds.pop(0)
            where = places[part]
            g = outer[where] - average
            v[where] = momentum * v[where] + g
            outer[where] = outer[where] - lr * (g + momentum * v[where])
            for each in x:
                each[where] = alpha * each[where] + (1 - alpha) * outer[where]

    for t in range(STEPS):
        x = [each.clone() for each in stepped(x, t)]
        land(x, t)
        due = [part for part in range(parts) if (t + 1 - (part + 1) * k // parts) % k == 0]
        pending_rounds += [(t, part, mean(x)[places[part]]) for part in due]
        land(x, t)
        trace.append([each.clone() for each in x])
    return trace


STREAMING = Strategy(
    subject="delta", rounds=Every(6, fragments=3), overlap=Delayed(2), merge=OuterStep(0.4, 0.9, local=0.5)
)
COCOD = parse("localsgd:sync_every=4,fragment_sync_delay=3")

DENSE_COX = replace(parse("dilocox:sync_every=4,outer_momentum=0.9"), compressor=Dense())  # type: ignore[type-var]

KEEP = Strategy(
    subject="delta", rounds=Every(4), compressor=TopK(ratio=0.3), topology=Flat(), merge=LocalResidual()
)
CODED = replace(KEEP, compressor=PredictiveCoding(TopK(ratio=0.3), Persistent(0.5)))

CASES: dict[str, tuple[str | Strategy, Callable[[], Trace]]] = {
    "local sgd": ("localsgd:sync_every=4", lambda: local_sgd(4)),
    "local sgd, odd": ("localsgd:sync_every=5", lambda: local_sgd(5)),
    "every step": ("localsgd:sync_every=1", lambda: local_sgd(1)),
    "local sgd, in turn": ("localsgd:sync_every=6,fragments=3", lambda: streaming(6, 3, 0, 0.0, 1.0, 0.0)),
    "mp2, all sent": ("mp2:rescale=false,sync_every=4,budget=1.0", lambda: local_sgd(4)),
    "mp2, all sent, own kept": ("mp2:sync_every=4,budget=1.0,predictor=own", lambda: local_sgd(4)),
    "sparta, all averaged": ("sparta:ratio=1.0,sync_every=4", lambda: local_sgd(4)),
    "keep": (KEEP, lambda: sparse(4, 0.3, 0.0)),
    "predictive": (CODED, lambda: sparse(4, 0.3, 0.5)),
    "easgd": ("easgd:sync_every=3,beta=0.9", lambda: easgd(3, 0.9)),
    "slowmo": ("slowmo:sync_every=4,momentum=0.6,slow_lr=0.9", lambda: slowmo(4, 0.9, 0.6)),
    "diloco": ("diloco:sync_every=5", lambda: diloco(5, 0.7, 0.9)),
    "muloco": ("muloco:sync_every=5", lambda: diloco(5, 0.7, 0.6)),
    "muloco in 2 bits": (
        "muloco:sync_every=4,bits=2,topology=all-gather",
        lambda: fed_back(4, 0.9, 0.7, 0.6, two_means),
    ),
    "sparseloco, exact": (
        "sparseloco:sync_every=4,k=2,chunk=5,bits=none",
        lambda: fed_back(4, 0.95, 1.0, 0.0, largest(2, 5)),
    ),
    "sparseloco": (
        "sparseloco:sync_every=3,k=2,chunk=5,decay=0.9,outer_lr=0.8",
        lambda: fed_back(3, 0.9, 0.8, 0.0, largest(2, 5), two_means),
    ),
    "dilocox, dense": (DENSE_COX, lambda: one_round_late(4, 0.7, 0.9)),
    "eager diloco": ("eager-diloco:sync_every=4", lambda: eager(4, 0.7, 0.6)),
    "eager diloco without momentum": (
        "eager-diloco:sync_every=3,outer_lr=0.9,outer_momentum=0.0",
        lambda: eager(3, 0.9, 0.0),
    ),
    "desloc": ("desloc:sync_every=4", lambda: local_sgd(4)),
    "overlap": ("overlap-localsgd:sync_every=4,alpha=0.6,momentum=0.7", lambda: overlapped(4, 0.6, 0.7)),
    "od-sgd": ("odsgd", lambda: late_average(1, 1)),
    "cocod": (COCOD, lambda: late_average(4, 3)),
    "streaming": (STREAMING, lambda: streaming(6, 3, 2, 0.5, 0.4, 0.9)),
    "diloco without a trick": (
        Strategy(subject="delta", rounds=Every(4), merge=OuterStep(lr=1.0, momentum=0.0)),
        lambda: local_sgd(4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_trajectory_is_the_papers(case: str) -> None:
    strategy, reference = CASES[case]
    crew = Crew(strategy, P)
    ours, expected = crew.train(STEPS), reference()
    crew.close()
    for t in range(STEPS):
        for rank in range(P):
            torch.testing.assert_close(ours[rank][t].double(), expected[t][rank], rtol=0, atol=2e-6)


LATE = ["odsgd", "eager-diloco:sync_every=4", "overlap-localsgd:sync_every=4", STREAMING, COCOD, DENSE_COX]


@pytest.mark.parametrize(
    "strategy",
    [*LATE, KEEP, CODED, "easgd:sync_every=3", "slowmo:sync_every=4", "diloco:sync_every=5",
     "diloco:sync_every=5,bits=4", "sparseloco:sync_every=3,k=2,chunk=5", "muloco:sync_every=5,bits=2",
     Strategy(subject="delta", rounds=Every(6, fragments=2), overlap=Delayed(3),
              compressor=ErrorFeedback(TopK(ratio=0.2)), merge=Average())],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("stop", [5, 7, 8])
def test_a_run_that_is_saved_and_resumed_is_the_run_that_never_stopped(
    strategy: str | Strategy, stop: int
) -> None:
    """Bit for bit, with rounds under way; and saving changes nothing."""
    straight, saving, resumed = (Crew(strategy, P) for _ in range(3))
    whole = straight.train(STEPS)
    saving.train(stop)
    saved = [replica.save() for replica in saving.replicas]
    if strategy in LATE and stop == 5:
        assert any(replica.progress.under_way for replica in saving.replicas)
    after = saving.train(STEPS - stop)
    resumed.each(lambda rank, replica: replica.load(saved[rank]))
    again = resumed.train(STEPS - stop)
    for rank in range(P):
        assert torch.equal(after[rank][-1], whole[rank][-1])
        assert torch.equal(again[rank][-1], whole[rank][-1])
    for crew in (straight, saving, resumed):
        crew.close()


@pytest.mark.parametrize("strategy", [*LATE, CODED, "easgd:sync_every=3", "adacomm:sync_every=4"], ids=str)
def test_sync_leaves_all_replicas_at_the_common_point_and_nothing_under_way(strategy: str | Strategy) -> None:
    crew = Crew(strategy, P)
    crew.train(11, loss=lambda step: 1.0)
    crew.sync()
    first, *others = [replica.flat for replica in crew.replicas]
    assert all(torch.equal(first, other) for other in others)
    assert not any(replica.progress.under_way for replica in crew.replicas)
    rounds = [replica.session.round for replica in crew.replicas]
    crew.sync()
    assert [replica.session.round for replica in crew.replicas] == rounds, "no step was taken since"
    crew.train(9, loss=lambda step: 1.0)
    crew.close()


def test_agreeing_out_of_turn_takes_the_mean_and_no_outer_step() -> None:
    crew = Crew("diloco:sync_every=5", P)
    crew.train(7)
    before = torch.stack([replica.flat for replica in crew.replicas]).mean(0)
    crew.sync()
    torch.testing.assert_close(crew.replicas[0].flat, before)
    crew.close()


def test_the_mean_is_weighted() -> None:
    crew = Crew("localsgd:sync_every=4", P, shares=[0.5, 1.0, 1.5])
    ours = crew.train(4)
    x = start()
    for t in range(4):
        x = stepped(x, t)
    expected = (0.5 * x[0] + 1.0 * x[1] + 1.5 * x[2]) / 3
    for rank in range(P):
        torch.testing.assert_close(ours[rank][3].double(), expected, rtol=0, atol=1e-6)
    crew.close()


def test_the_true_lag_is_told() -> None:
    seen: list[int] = []

    class Noting(Average):
        def apply_(self, now, then, mean, mine, state, at):  # type: ignore[no-untyped-def]
            seen.append(at.lag)
            super().apply_(now, then, mean, mine, state, at)

    strategy = Strategy(subject="delta", rounds=Every(4), overlap=Delayed(3), merge=Noting())
    crew = Crew(strategy, 1)
    buckets = len(crew.replicas[0].session.buckets)
    crew.train(8)  # leaves after step 3, lands after 6; leaves after 7
    crew.train(1)
    crew.sync()  # one step later: lands early
    assert seen == [3] * buckets + [1] * buckets
    assert crew.replicas[0].session.metrics()["lag"] == 2.0
    assert "parameters every 4 steps" in crew.replicas[0].session.summary
    assert ", 3 steps late" in crew.replicas[0].session.summary
    crew.close()


# ---- adaptive periods ---------------------------------------------------------------------------------


def rounds_of(crew: Crew, steps: int, loss: Callable[[int], float] | None) -> list[int]:
    crew.train(steps, loss)
    return [record.step for record in crew.replicas[0].session.stats.records]


def test_adacomm_talks_more_often_as_the_loss_falls() -> None:
    crew = Crew(Strategy(subject="delta", rounds=AdaComm(8, interval=16), merge=Average()), P)
    # F_0 = 1 before the first round; at step 24 F = 1/4: ceil(sqrt(1/4) * 8) = 4; at 40 no smaller: 2.
    steps = rounds_of(crew, 48, loss=lambda step: 1.0 if step < 8 else 0.25)
    assert steps == [7, 15, 19, 23, 27, 31, 33, 35, 37, 39, 41, 43, 45, 47]
    crew.close()


def periods_of(rates: list[float], losses: list[float], interval: int) -> list[float]:
    """Those of AdaComm(16), told these after every step."""
    rounds, found = AdaComm(16, interval), []
    schedule_state = rounds.start()
    for step, (lr, loss) in enumerate(zip(rates, losses, strict=True)):
        schedule_state = rounds.observe(schedule_state, {"step": step, "lr": lr, "loss": loss})
        found.append(schedule_state["period"])
    return found


def test_the_papers_eta_0_is_the_largest_learning_rate_and_its_time_begins_with_it() -> None:
    warm = [0.01, 0.02, 0.05, 0.1]
    rates, losses = [0.1, 0.1, 0.05, 0.02, 0.02], [0.9, 0.4, 0.15, 0.02, 0.01]
    found = periods_of(warm + rates, [1.0] * 4 + losses, interval=1)
    assert found[:4] == [16.0] * 4, "a rate that rises says nothing of the period"
    expected, period = [], 16
    for lr, loss in zip(rates, losses, strict=True):  # F_0 = 1, of the beginning
        told = math.ceil(math.sqrt(0.1 / lr * loss / 1.0) * 16)
        period = told if told < period else math.ceil(period / 2)
        expected.append(float(period))
    assert found[4:] == expected


def test_a_warm_up_does_not_shorten_the_period_as_if_the_loss_had_fallen() -> None:
    """The rate rises for a fifth of the run, and falls to the end; the loss falls by a third."""
    steps = 500
    rates = [0.1 * min((t + 1) / 100, (steps - t) / 400) for t in range(steps)]
    losses = [2.3 - 0.8 * t / steps for t in range(steps)]
    found = periods_of(rates, losses, interval=100)
    assert set(found[:199]) == {16.0}
    # The loss falls too slowly for the period to follow, so the paper's rule halves it, as on a plateau.
    assert [found[t] for t in (199, 299, 399)] == [8.0, 4.0, 2.0]


def test_without_the_loss_every_rank_is_told_what_to_write() -> None:
    crew = Crew(Strategy(subject="delta", rounds=AdaComm(4), merge=Average()), P)
    with pytest.raises(ConfigError, match=r"session\.observe\(loss\)"):
        crew.train(4)


def test_a_plateau_shortens_the_period_and_each_epoch_ends_with_a_round() -> None:
    rounds = OnPlateau(8, patience=1, factor=2)
    crew = Crew(
        Strategy(subject="delta", rounds=rounds, merge=Average()), P, schedule_state={"steps_per_epoch": 10.0}
    )
    # Epochs of loss 1, 1, 1: best, bad, bad again, which is a plateau: from then on every 4 steps.
    steps = rounds_of(crew, 40, loss=lambda step: 1.0)
    assert steps == [7, 9, 17, 19, 27, 29, 33, 37, 39]
    crew.close()


def test_the_period_follows_the_variance() -> None:
    crew = Crew(Strategy(subject="delta", rounds=ByVariance(4, sample_steps=8), merge=Average()), P)
    crew.train(40)
    schedule_state = crew.replicas[0].session.schedule.state
    assert schedule_state["samples"] == 2
    assert all(replica.session.schedule.state == schedule_state for replica in crew.replicas)
    crew.close()


def test_sparta_averages_some_parameters_and_leaves_the_others() -> None:
    crew = Crew("sparta:ratio=0.2,sync_every=3", P)
    alone = [steps[-1] for steps in Crew("localsgd:sync_every=100", P).train(3)]
    found = torch.stack([steps[-1] for steps in crew.train(3)])
    met = (found == found[0]).all(0)
    assert met.sum() == sum(math.ceil(0.2 * len(where)) for where in rows())
    torch.testing.assert_close(found[0][met], mean(alone)[met], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[:, ~met], torch.stack(alone)[:, ~met], rtol=0, atol=1e-6)
    crew.close()


def test_fragments_take_turns() -> None:
    rounds = Every(8, fragments=4)
    due = [[part for part in range(4) if rounds.at(step, {}, part)] for step in range(16)]
    assert due == [[], [0], [], [1], [], [2], [], [3]] * 2


def test_postlocal_is_two_levels() -> None:
    near, far = parse("postlocal:start_step=10,sync_every=4").levels
    assert [s for s in range(30) if near.rounds.at(s, {})] == list(range(10))
    assert [s for s in range(30) if far.rounds.at(s, {})] == [13, 17, 21, 25, 29]
    assert [Schedule(far).inactive(s) for s in (0, 9, 10)] == [True, True, False]


# ---- cost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "merge",
    [Average(), OuterStep(), OuterStep(local=0.5), SlowMo(), Elastic()],
    ids=lambda merge: repr(merge),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_landing_allocates_nothing_large(merge: Merge, dtype: torch.dtype) -> None:
    strategy = Strategy(subject="delta", rounds=Every(4), overlap=Delayed(2), merge=merge)
    crew = Crew(strategy, 1, sizes={"a": 100_000, "b": 50_000}, dtype=dtype)
    crew.train(10)
    (replica,) = crew.replicas
    replica.session.flush()
    assert replica.progress.under_way == []
    crew.train(3)
    replica.session.flush()
    assert replica.progress.under_way, "a round left after step 11"
    with torch.profiler.profile(profile_memory=True) as seen:
        replica.progress.act(13)
    assert replica.progress.under_way == []
    largest = max(event.self_cpu_memory_usage for event in seen.key_averages())
    assert largest <= 1 << 16, seen.key_averages().table()
    assert len(seen.key_averages()) > 2, "the profiler has seen nothing"
    crew.close()


# ---- peers --------------------------------------------------------------------------------------------

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "torchft_diloco.json").read_text())


@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        ("diloco", "diloco:sync_every=5"),
        ("streaming", "streaming-diloco:sync_every=8,fragments=2,fragment_sync_delay=2,bits=32"),
    ],
)
def test_diloco_is_torchfts(case: str, algorithm: str) -> None:
    """Of a fragment, torchft's leaves `fragment_sync_delay` steps before its turn ends, ours at its end."""
    expected = torch.tensor(GOLDEN[case]["trace"])
    crew = Crew(algorithm, len(expected))
    ours = crew.train(expected.shape[1])
    crew.close()
    for rank, trace in enumerate(ours):
        torch.testing.assert_close(torch.stack(trace), expected[rank], rtol=0, atol=1e-6)


# ---- bad input ----------------------------------------------------------------------------------------


@for_each(
    ("make", "says"),
    [
        (lambda: parse("localsgd:sync_every=0"), "sync_every=0 is not possible: write 1 or more steps"),
        (lambda: Every(True), "sync_every=True is not possible"),
        (lambda: Every(4, fragments=5), "fragments=5 do not fit into sync_every=4 steps"),
        (lambda: Every(4, fragments=0), "fragments=0 is not possible: write 1 or more parts"),
        (lambda: parse("postlocal:start_step=0"), "start_step=0 is not a whole number, 1 or more"),
        (lambda: parse("streaming-diloco:sync_every=4,fragment_sync_delay=5"), "Delayed(steps=4) at most"),
        (lambda: Delayed(0), "steps=0) is not possible: write a whole number of 1 or more"),
        (lambda: OuterStep(lr=0.0), "lr=0.0 is not possible: write a number above 0"),
        (lambda: OuterStep(momentum=1.0), "momentum=1.0 is not possible"),
        (lambda: OuterStep(local=float("nan")), "local=nan is not possible"),
        (lambda: SlowMo(slow_lr="big"), "slow_lr='big' is not possible"),  # type: ignore[arg-type]
        (lambda: parse("easgd:beta=2"), "beta=2.0 is not possible: write a number above 0 and below 2"),
        (lambda: AdaComm(4, interval=0), "interval=0 is not possible: write 1 or more steps"),
        (lambda: OnPlateau(4, threshold=1.0), "threshold=1.0 is not possible"),
        (lambda: OnPlateau(4, factor=1), "factor=1 is not possible: write 2 or more"),
        (lambda: parse("diloco:bits=12"), "bits=12 is not possible: write 32 (fp32), 16 (bf16), or 2 to 8"),
        (
            lambda: Strategy(rounds=Every(4)),
            "rounds=Every(sync_every=4, fragments=1, start_step=0) with subject='gradient' would lose",
        ),
        (lambda: Strategy(subject="delta"), "merge=Replace() cannot apply a delta"),
        (lambda: Strategy(merge=Elastic()), "merge=Elastic(beta=0.9) cannot apply a gradient"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()


def test_a_period_that_no_epoch_reaches_is_told(caplog: pytest.LogCaptureFixture) -> None:
    epoch_length.warn_of_long_periods(parse("localsgd:sync_every=22"), {"steps_per_epoch": 22.0})
    epoch_length.warn_of_long_periods(parse("diloco:sync_every=500"), {})
    assert caplog.text == ""
    epoch_length.warn_of_long_periods(parse("diloco:sync_every=500"), {"steps_per_epoch": 22.0})
    assert "sync_every=500 is longer than an epoch of 22 steps" in caplog.text
    plateau = Strategy(subject="delta", rounds=OnPlateau(23), merge=Average())
    with pytest.raises(
        AttachError, match=r"sync_every=23 is longer than an epoch of 22 steps.*write 22 at most"
    ):
        epoch_length.check(plateau, {"steps_per_epoch": 22.0})


def test_more_fragments_than_parameters_are_refused() -> None:
    strategy = Strategy(subject="delta", rounds=Every(8, fragments=5), merge=Average())
    with pytest.raises(AttachError, match="4 parameters cannot be cut into 5 fragments: write fewer"):
        Crew(strategy, 1)


def test_another_period_goes_on_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    first, other = Crew("localsgd:sync_every=4", P), Crew("localsgd:sync_every=3", P)
    first.train(5)
    saved = [replica.save() for replica in first.replicas]
    other.each(lambda rank, replica: replica.load(saved[rank]))
    assert "goes on with Every(sync_every=3" in caplog.text
    other.train(6)
    assert [record.step for record in other.replicas[0].session.stats.records] == [5, 8]
    for crew in (first, other):
        crew.close()


def test_a_round_under_way_is_not_lost_to_another_period() -> None:
    first = Crew(COCOD, P)
    first.train(5)
    saved = [replica.save() for replica in first.replicas]
    other = Crew(replace(COCOD, rounds=Every(5)), P)
    with pytest.raises(CheckpointError, match=r"has a round under way.*call session\.sync\(\)"):
        other.each(lambda rank, replica: replica.load(saved[rank]))
    for crew in (first, other):
        crew.close()
