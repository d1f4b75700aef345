"""`lowbit`: nothing that a worker has done is lost, whatever the bits, the topology and the delay."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from replica_threads import LR, Crew, Replica, gradient
from torch import Tensor

from cases import for_each
from tacit.algorithms import lowbit, parse
from tacit.checkpoint.session_state import join_states
from tacit.compressors import Blockwise, Dense, ErrorFeedback, MeanFeedback
from tacit.contracts import Overlap
from tacit.errors import ConfigError
from tacit.merges import Average, CommonPoint, LocalResidual
from tacit.overlap import Bucketwise, Delayed
from tacit.prediction import LeastSquares, PredictiveCoding
from tacit.rounds import Every
from tacit.strategy import Strategy
from tacit.topologies import Auto, Flat, TwoPhase

P = 3
SIZES = {"a": 1700, "b": 3, "c": 530, "d": 1024}


PREDICTORS = ["", "last", "least-squares"]


def strategy(
    bits: int = 3,
    every: int = 1,
    topology: Auto | Flat | TwoPhase | None = None,
    late: bool = False,
    predictor: str = "",
) -> Strategy:
    beside = f",predictor={predictor}" if predictor else ""
    (level,) = parse(f"lowbit:bits={bits},sync_every={every},late={int(late)}{beside}").levels
    return replace(level, topology=topology or TwoPhase())


def kept(replica: Replica, field: str) -> Tensor:
    """A field of all parameters, in their order."""
    found = replica.progress.saved_state()
    return torch.cat([found[name, field].tensor.double() for name in replica.named])


def owed(crew: Crew) -> Tensor:
    """What the means have left out: of each rank's slice, put together."""
    whole = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
    for replica in crew.replicas:
        for (name, field), part in replica.session.store.named_state().items():
            if field == "topology.second":
                whole[name][part.start : part.start + part.tensor.numel()] += part.tensor
    return torch.cat([*whole.values()])


def total(crew: Crew) -> Tensor:
    """x + e + the mean of x_r - x; where replicas are at x, of what they have put aside."""
    x = kept(crew.replicas[0], "anchor")
    own = [replica.flat.double() - x + kept(replica, "unsent") for replica in crew.replicas]
    return x + owed(crew) + torch.stack(own).mean(0)


def progress(before: list[Tensor], step: int) -> Tensor:
    """The mean of what the optimizers do in a step."""
    return torch.stack([-LR * gradient(each, rank, step).double() for rank, each in enumerate(before)]).mean(
        0
    )


ROUNDS = [(1, TwoPhase()), (2, TwoPhase()), (1, Flat())]
CODES = [(2, ""), (3, ""), (8, ""), (3, "last"), (2, "least-squares")]
SOME = [(*code, *round_) for code, round_ in zip(CODES, ROUNDS + ROUNDS, strict=False)]
OTHERS = [
    each for each in product([2, 3, 4, 8], PREDICTORS, [1, 2], [TwoPhase(), Flat()]) if each not in SOME
]


@for_each(("bits", "predictor", "every", "topology"), SOME)
def test_all_that_workers_do_is_in_the_point_or_owed(
    predictor: str, bits: int, every: int, topology: TwoPhase | Flat
) -> None:
    assert_nothing_is_lost(predictor, bits, every, topology)


@for_each(("bits", "predictor", "every", "topology"), OTHERS)
def test_it_is_so_in_every_other_combination(
    predictor: str, bits: int, every: int, topology: TwoPhase | Flat
) -> None:
    assert_nothing_is_lost(predictor, bits, every, topology)


def assert_nothing_is_lost(predictor: str, bits: int, every: int, topology: TwoPhase | Flat) -> None:
    """After each step the total has changed by the mean progress."""
    crew = Crew(strategy(bits, every, topology, predictor=predictor), P, sizes=SIZES)
    for step in range(8):
        before, was = [replica.flat.clone() for replica in crew.replicas], total(crew)
        crew.train(1)
        expected = was + progress(before, step)
        torch.testing.assert_close(total(crew), expected, rtol=0, atol=1e-6)
    assert (float(owed(crew).abs().max()) > 1e-5) == (topology == TwoPhase()), (
        "an all-gather compresses no mean"
    )
    assert not torch.equal(crew.replicas[0].flat, crew.replicas[1].flat)
    assert_alike(crew, bool(predictor))
    crew.close()


def assert_alike(crew: Crew, predicts: bool) -> None:
    """All ranks have the same past and the same sums, to the bit, and some are not zero."""
    mine, *others = (
        {name: part.tensor for name, part in replica.session.store.named_state().items() if shared(name)}
        for replica in crew.replicas
    )
    assert bool(mine) == predicts
    assert all(bool(tensor.any()) for tensor in mine.values())
    for other in others:
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def shared(name: tuple[str, str]) -> bool:
    return name[1] == "fit" or name[1].startswith("past")


@for_each("every", [1, 2])
@for_each("predictor", PREDICTORS)
def test_nothing_is_lost_where_answers_come_late(predictor: str, every: int) -> None:
    crew = Crew(strategy(3, every, late=True, predictor=predictor), P, sizes=SIZES)
    expected = total(crew)
    for step in range(9):
        before = [replica.flat.clone() for replica in crew.replicas]
        crew.train(1)
        expected = expected + progress(before, step)
    assert any(replica.progress.under_way for replica in crew.replicas)
    crew.sync()
    torch.testing.assert_close(total(crew), expected, rtol=0, atol=2e-6)
    crew.close()


@for_each(("every", "overlap"), [(1, Bucketwise()), (4, Bucketwise())])
def test_where_all_is_sent_it_is_local_sgd(every: int, overlap: Overlap) -> None:
    dense = Strategy(
        subject="delta", rounds=Every(every), compressor=Dense(), overlap=overlap, merge=CommonPoint()
    )
    ours, theirs = Crew(dense, P, sizes=SIZES), Crew(f"localsgd:sync_every={every}", P, sizes=SIZES)
    for mine, other in zip(ours.train(13), theirs.train(13), strict=True):
        torch.testing.assert_close(torch.stack(mine), torch.stack(other), rtol=0, atol=2e-6)
    for crew in (ours, theirs):
        crew.close()


def test_one_worker_alone_trains_as_if_nothing_were_rounded() -> None:
    crew = Crew(strategy(2, topology=Auto()), 1, sizes=SIZES)
    x = crew.replicas[0].flat.clone()
    for step, ((found,),) in enumerate(crew.train(1) for _ in range(6)):
        x = x - LR * gradient(x, 0, step)
        torch.testing.assert_close(found, x, rtol=0, atol=1e-6)
    crew.close()


@for_each("late", [False, True])
def test_sync_puts_what_is_unsent_aside_and_training_takes_it_up(late: bool) -> None:
    crew = Crew(strategy(2, late=late), P, sizes=SIZES)
    crew.train(5)
    rounds = crew.replicas[0].session.pending.begun
    crew.sync()
    x = kept(crew.replicas[0], "anchor").float()
    assert all(torch.equal(replica.flat, x) for replica in crew.replicas)
    assert crew.replicas[0].session.pending.begun == rounds, "it takes no round"
    before, was = [replica.flat.clone() for replica in crew.replicas], total(crew)
    aside = [kept(replica, "unsent") for replica in crew.replicas]
    assert all(float(each.abs().max()) > 1e-3 for each in aside)
    crew.train(1)
    crew.sync()
    torch.testing.assert_close(total(crew), was + progress(before, 5), rtol=0, atol=1e-6)
    crew.close()


def test_a_prediction_decides_what_is_rounded_and_nothing_else() -> None:
    """Where all is sent as it is, replicas go where they would; in few bits, not quite."""
    plain = replace(strategy(), compressor=Dense())
    guessing = replace(plain, compressor=PredictiveCoding(Dense(), LeastSquares(3)))
    for one, other, near in (
        (plain, guessing, True),
        (strategy(), strategy(predictor="last"), False),
    ):
        crews = [Crew(each, P, sizes=SIZES) for each in (one, other)]
        ends = [torch.stack([trace[-1] for trace in crew.train(12)]) for crew in crews]
        assert (float((ends[0] - ends[1]).abs().max()) < 1e-5) == near
        for crew in crews:
            crew.close()


RESUMED = [
    ("", (4, True), False),
    ("last", (5, False), False),
    ("", (5, False), True),
    ("last", (4, True), True),
]
RESUMED_TOO = [
    each for each in product(PREDICTORS, [(4, True), (5, False)], [False, True]) if each not in RESUMED
]


@for_each(("predictor", "stop", "late"), RESUMED)
def test_a_resumed_run_is_the_run_that_never_stopped(
    predictor: str, stop: tuple[int, bool], late: bool
) -> None:
    assert_resumes(predictor, stop, late)


@for_each(("predictor", "stop", "late"), RESUMED_TOO)
def test_every_other_run_that_is_resumed_is_the_run_that_never_stopped(
    predictor: str, stop: tuple[int, bool], late: bool
) -> None:
    assert_resumes(predictor, stop, late)


def assert_resumes(predictor: str, stop: tuple[int, bool], late: bool) -> None:
    """Saved at the common point, and in between."""
    steps, at_point = stop
    saving, resumed = (Crew(strategy(3, late=late, predictor=predictor), P, sizes=SIZES) for _ in range(2))
    saving.train(steps)
    if at_point:
        saving.sync()
    saved = saving.save()
    after = saving.train(4)
    resumed.each(lambda rank, replica: replica.load(saved[rank]))
    again = resumed.train(4)
    for rank in range(P):
        assert torch.equal(after[rank][-1], again[rank][-1])
    for crew in (saving, resumed):
        crew.close()


@for_each("predictor", PREDICTORS)
def test_another_number_of_workers_goes_on_with_all_that_is_owed(predictor: str) -> None:
    saving, resumed = (Crew(strategy(2, predictor=predictor), ranks, sizes=SIZES) for ranks in (P, 2))
    saving.train(5)
    saving.sync()
    saved = saving.save()
    parameters = saved[0]["parameters"]
    whole = join_states({k: v for k, v in each.items() if k != "parameters"} for each in saved)
    resumed.each(lambda _, replica: replica.load({**whole, "parameters": parameters}))
    torch.testing.assert_close(total(resumed), total(saving), rtol=0, atol=1e-6)
    own = [kept(replica, "unsent") for replica in resumed.replicas]
    assert torch.equal(own[0], own[1])
    assert float(own[0].abs().max()) > 1e-4
    kept_alike = [crew.replicas[0].session.store.named_state() for crew in (saving, resumed)]
    for name in filter(shared, kept_alike[0]):
        assert torch.equal(*(state[name].tensor for state in kept_alike))
    resumed.train(2)
    assert_alike(resumed, bool(predictor))
    for crew in (saving, resumed):
        crew.close()


@for_each(
    ("make", "says"),
    [
        (lambda: parse("lowbit:bits=1"), "bits=1 is not a whole number, from 2 to 8"),
        (lambda: parse("lowbit:bits=9"), "bits=9 is not a whole number, from 2 to 8"),
        (lambda: parse("lowbit:sync_every=0"), "sync_every=0"),
        (lambda: parse("lowbit:late=2"), "late=2 is not a whole number, from 0 to 1"),
        (lambda: parse("lowbit:late=1,sync_every=4"), "late=1 with sync_every=4 is not possible"),
        (lambda: parse("lowbit:predictor=own"), "predictor 'own'. Known: last, least-squares, none"),
        (lambda: lowbit(predictor="linear"), "predictor 'linear'. Known: last, least-squares"),  # type: ignore[arg-type]
        (lambda: parse("lowbit:predictor=last,weights=a.pt"), "unknown parameter of lowbit 'weights'"),
        (lambda: parse("lowbit:budget=0.1,drops=2"), "unknown parameter of lowbit 'budget'"),
        (lambda: parse("mp2:predictor=own,rescale=true"), "rescale=true with predictor='own'"),
        (
            lambda: parse("mp2:subset=magnitude,rescale=true"),
            "the largest entries do not stand for others",
        ),
        (lambda: MeanFeedback(ErrorFeedback(Blockwise())), "keeps a residual itself: write a one-shot"),
        (lambda: Strategy(compressor=MeanFeedback(Blockwise())), "would lose what a rank does not send"),
        (
            lambda: Strategy(subject="delta", compressor=MeanFeedback(Blockwise()), merge=Average()),
            "write ErrorFeedback for MeanFeedback",
        ),
        (
            lambda: Strategy(subject="delta", overlap=Delayed(1), rounds=Every(2), merge=LocalResidual()),
            "or write merge=CommonPoint() with overlap=Delayed(1)",
        ),
        (
            lambda: Strategy(subject="delta", compressor=ErrorFeedback(Blockwise()), merge=CommonPoint()),
            "would keep what was not sent twice",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        make()  # type: ignore[operator]
