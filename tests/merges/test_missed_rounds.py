"""`lowbit` where a worker misses rounds, dies, comes back or joins late: what the others do is not lost."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from replica_threads import LR, Crew, Replica, gradient
from served_replicas import ServedCrew
from test_common_point import kept
from torch import Tensor

from cases import for_each
from in_threads import in_threads
from tacit.algorithms import parse
from tacit.compressors import Blockwise, ErrorFeedback
from tacit.contracts import Merge, Topology
from tacit.errors import ConfigError, NonFinite, PeerLost, RoundError
from tacit.merges import CommonPoint, LocalResidual, ServerParams
from tacit.stores.server.averaging_service import AveragingState
from tacit.stores.server.parameter_service import ServiceState
from tacit.strategy import Strategy
from tacit.topologies import Asynchronous, StaleSynchronous, Star, Synchronous
from tacit_lab.cli.run import options

P = 3
SIZES = {"a": 1700, "b": 3, "c": 530, "d": 1024}
APART = [
    "lowbit:bound=0",
    "lowbit:bound=2,bits=2",
    "lowbit:bound=1,entropy=true",
    "lowbit:bound=0,bits=8,sync_every=2",
]


def apart(text: str = "lowbit:bound=0", dtype: torch.dtype = torch.float32) -> ServedCrew:
    """A crew whose server keeps X."""
    crew = ServedCrew(text, P, sizes=SIZES, dtype=dtype)
    crew.enter()
    return crew


def averaging(text: str = "lowbit") -> ServedCrew:
    """A crew whose server averages, as by default."""
    (level,) = parse(text).levels
    return ServedCrew(replace(level, topology=Star()), P, sizes=SIZES)


def step(
    crew: Crew, ranks: Sequence[int], spoil: Callable[[Replica], object] = lambda replica: None
) -> Tensor:
    """These ranks take a step, the others none; a P-th of what their optimizers have done.

    `spoil` is done to each before its round.
    """
    done = torch.zeros(sum(SIZES.values()), dtype=torch.float64)
    moves = [torch.zeros(0)] * len(crew.replicas)
    for rank in ranks:
        replica = crew.replicas[rank]
        moves[rank] = -LR * gradient(replica.flat, rank, replica.session.step)
        done += moves[rank].double() / P

    def work(rank: int, replica: Replica) -> None:
        if rank in ranks:
            for p, move in zip(replica.named.values(), moves[rank].split([*SIZES.values()]), strict=True):
                p.add_(move)
            spoil(replica)
            replica.progress.after_step()

    crew.each(work)
    return done


def kept_by(crew: ServedCrew) -> Tensor:
    """X."""
    states = [crew.server.states[f"{name}/0"] for name in SIZES]
    assert all(isinstance(state, ServiceState) and state.x is not None for state in states)
    return torch.cat([state.x.double() for state in states])


def unsent(crew: Crew, rank: int) -> Tensor:
    """d of a worker: what it has done and not sent."""
    replica = crew.replicas[rank]
    return replica.flat.double() - kept(replica, "anchor") + kept(replica, "unsent")


def total(crew: ServedCrew, ranks: Sequence[int] = range(P)) -> Tensor:
    """X + the mean of d, of all P workers; of those that are gone, d is lost."""
    found = kept_by(crew)
    for rank in ranks:
        found = found + unsent(crew, rank) / P
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def assert_steps_add_up(crew: ServedCrew, whole: Callable[[ServedCrew], Tensor], steps: int) -> None:
    """In each step of all workers the whole moves by the mean of what their optimizers have done."""
    for _ in range(steps):
        expected = whole(crew) + step(crew, range(P))
        assert_close(whole(crew), expected)


# ---- a server that keeps X: rounds without some of the workers ------------------------------------------


@for_each("text", APART)
def test_where_nobody_misses_anything_nothing_is_lost(text: str) -> None:
    crew = apart(text)
    assert_steps_add_up(crew, total, 8)
    assert all(float(unsent(crew, rank).abs().max()) > 1e-5 for rank in range(P)), "nothing is kept back"
    assert float((kept_by(crew) - kept(crew.replicas[0], "anchor")).abs().max()) > 1e-5, "all was answered"
    crew.close()


def test_the_first_round_is_that_of_a_server_that_averages() -> None:
    """Later ones too, but for entries on the edge between two levels."""
    for bits in (2, 3, 8):
        ours, theirs = apart(f"lowbit:bound=0,bits={bits}"), averaging(f"lowbit:bits={bits}")
        for crew in (ours, theirs):
            step(crew, range(P))
        for mine, other in zip(ours.replicas, theirs.replicas, strict=True):
            torch.testing.assert_close(kept(mine, "anchor"), kept(other, "anchor"), rtol=0, atol=1e-6)
            torch.testing.assert_close(mine.flat, other.flat, rtol=0, atol=1e-6)
        for crew in (ours, theirs):
            crew.close()


@for_each("bits", [2, 3, 4, 8])
@for_each("every", [1, 2])
def test_who_misses_rounds_keeps_its_own_and_is_told_of_all_by_one_answer(every: int, bits: int) -> None:
    crew = apart(f"lowbit:bound=2,bits={bits},sync_every={every}")
    for _ in range(every):
        step(crew, range(P))
    before, here = unsent(crew, 2), kept(crew.replicas[2], "anchor")
    for _ in range(2 * every):
        expected = total(crew)
        expected += step(crew, (0, 1))
        assert_close(total(crew), expected)
    assert torch.equal(unsent(crew, 2), before), "it has heard of nothing, and lost nothing"
    gap = (kept_by(crew) - here).abs().max()
    for _ in range(every):
        expected = total(crew)
        expected += step(crew, (2,))
        assert_close(total(crew), expected)
    assert (kept_by(crew) - kept(crew.replicas[2], "anchor")).abs().max() < gap
    assert not torch.equal(kept(crew.replicas[2], "anchor"), here)
    crew.close()


def test_nobody_is_more_than_so_many_rounds_ahead() -> None:
    crew = apart("lowbit:bound=2")
    for _ in range(2):
        step(crew, (0,))
    with pytest.raises(AssertionError, match="a rank hangs"):
        in_a_moment(crew, 0)
    crew.server.leave(1)
    crew.server.leave(2)
    crew.replicas[0].session.flush()


def in_a_moment(crew: ServedCrew, rank: int) -> None:
    in_threads(1, lambda _: crew.replicas[rank].progress.after_step(), seconds=0.5)


@for_each("text", APART)
def test_a_dead_worker_loses_what_it_has_not_sent_and_comes_back_at_x(text: str) -> None:
    crew, every = apart(text), 2 if "sync_every=2" in text else 1
    for _ in range(2 * every):
        step(crew, range(P))
    crew.server.leave(2)
    for _ in range(4 * every):
        expected = total(crew, (0, 1))
        expected += step(crew, (0, 1))
        assert_close(total(crew, (0, 1)), expected)
    crew.server.again(2)
    crew.enter(2)
    assert torch.equal(crew.replicas[2].flat.double(), kept_by(crew))
    assert not bool(unsent(crew, 2).any())
    for _ in range(3 * every):
        expected = total(crew)
        expected += step(crew, range(P))
        assert_close(total(crew), expected)
    crew.sync()
    assert all(torch.equal(replica.flat, crew.replicas[0].flat) for replica in crew.replicas)
    crew.close()


def test_who_joins_late_begins_where_the_others_are() -> None:
    crew = ServedCrew("lowbit:bound=2", P, sizes=SIZES)
    crew.enter(0, 1)
    for _ in range(2):
        step(crew, (0, 1))
    crew.enter(2)
    assert torch.equal(crew.replicas[2].flat.double(), kept_by(crew))
    for ranks in ((2,), (2,), range(P), range(P)):
        expected = total(crew)
        expected += step(crew, ranks)
        assert_close(total(crew), expected)
    crew.close()


@for_each("late", [0, 1])
@for_each("bound", [0, 2])
def test_answers_that_come_late_lose_nothing(bound: int, late: int) -> None:
    crew = apart(f"lowbit:bound={bound},late={late}")
    expected = total(crew)
    for _ in range(7):
        expected += step(crew, range(P))
    assert bool(crew.replicas[0].progress.under_way) == bool(late)
    crew.sync()
    torch.testing.assert_close(total(crew), expected, rtol=0, atol=2e-6)
    for _ in range(3):
        expected += step(crew, range(P))
    crew.sync()
    torch.testing.assert_close(total(crew), expected, rtol=0, atol=3e-6)
    crew.close()


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_sync_takes_all_to_x_and_puts_aside_what_they_have_not_sent(dtype: torch.dtype) -> None:
    crew = apart("lowbit:bound=1", dtype)
    for _ in range(4):
        step(crew, range(P))
    was, before = total(crew), [unsent(crew, rank) for rank in range(P)]
    crew.sync()
    x = kept_by(crew).to(dtype)
    assert all(torch.equal(replica.flat, x) for replica in crew.replicas)
    if dtype == torch.float32:
        assert_close(total(crew), was)
        assert all(torch.allclose(unsent(crew, rank), before[rank], atol=1e-6) for rank in range(P))
        expected = total(crew) + step(crew, range(P))
        assert_close(total(crew), expected)
    crew.close()


@for_each("text", ["lowbit:bound=1", "lowbit:bound=1,late=1"])
@for_each("synced", [False, True])
def test_what_a_checkpoint_has_not_sent_is_not_sent_twice(synced: bool, text: str) -> None:
    """The server may have it by now."""
    crew = apart(text)
    for _ in range(4):
        step(crew, range(P))
    if synced:
        crew.sync()
    saved = crew.save()
    for _ in range(3):
        step(crew, range(P))
    crew.sync()
    crew.server.leave(2)
    crew.server.again(2)
    crew.replicas[2].load(saved[2])
    crew.enter(2)
    assert torch.equal(crew.replicas[2].flat.double(), kept_by(crew))
    assert not bool(unsent(crew, 2).any())
    expected = total(crew)
    for _ in range(3):
        expected += step(crew, range(P))
    crew.sync()
    torch.testing.assert_close(total(crew), expected, rtol=0, atol=2e-6)
    crew.close()


def test_a_server_that_goes_on_from_its_checkpoint_has_all_but_what_was_unsent() -> None:
    crew = apart()
    for _ in range(4):
        step(crew, range(P))
    x = kept_by(crew)
    crew.server.restart()
    assert torch.equal(kept_by(crew), x)
    crew.enter()
    assert all(torch.equal(replica.flat.double(), x) for replica in crew.replicas)
    for _ in range(3):
        expected = total(crew)
        expected += step(crew, range(P))
        assert_close(total(crew), expected)
    crew.close()


@for_each("value", [float("nan"), float("inf"), -float("inf")])
@for_each("text", APART[:3])
def test_what_is_not_finite_is_refused_before_it_is_quantised(text: str, value: float) -> None:
    crew = apart(text)
    step(crew, range(P))
    x = kept_by(crew)
    with pytest.raises(
        NonFinite, match="in the parameter c on rank 0, in step 1: this rank has pushed nothing"
    ):
        step(crew, (0,), lambda replica: replica.named["c"][5:6].fill_(value))
    states = crew.server.states
    assert torch.equal(kept_by(crew)[slice(*place("c"))], x[slice(*place("c"))])
    assert all(bool(state.x.isfinite().all()) for state in states.values())
    crew.server.leave(0)
    expected = total(crew, (1, 2))
    expected += step(crew, (1, 2))
    assert_close(total(crew, (1, 2)), expected)
    crew.close()


def place(name: str) -> tuple[int, int]:
    start = 0
    for each, size in SIZES.items():
        if each == name:
            return start, start + size
        start += size
    raise KeyError(name)


# ---- a server that averages: all wait for all, and all end ----------------------------------------------

ALL = [
    "lowbit",
    "lowbit:bits=2,late=1",
    "lowbit:entropy=true",
    "lowbit:predictor=last",
    "lowbit:sync_every=2,predictor=least-squares",
]


def owed(crew: ServedCrew) -> Tensor:
    """e."""
    found = []
    for name, size in SIZES.items():
        state = crew.server.states.get(f"{name}/0", AveragingState(()))
        assert isinstance(state, AveragingState)
        found.append(state.new_residual[0][0].double() if state.new_residual else torch.zeros(size).double())
    return torch.cat(found)


def averaged_total(crew: ServedCrew) -> Tensor:
    """x + e + mean(x_r - x)."""
    own = torch.stack([unsent(crew, rank) for rank in range(P)])
    return kept(crew.replicas[0], "anchor") + owed(crew) + own.mean(0)


@for_each("text", [text for text in ALL if "late" not in text])
def test_where_a_server_averages_nothing_is_lost(text: str) -> None:
    crew = averaging(text)
    assert_steps_add_up(crew, averaged_total, 6)
    assert float(owed(crew).abs().max()) > 1e-5
    crew.close()


@for_each("text", ALL)
def test_where_all_wait_for_all_a_lost_worker_ends_all_by_name_and_nothing_is_applied(text: str) -> None:
    crew, every = averaging(text), 2 if "sync_every=2" in text else 1
    for _ in range(2 * every):
        step(crew, range(P))
    crew.each(lambda _, replica: replica.session.flush())
    e, x = owed(crew), kept(crew.replicas[0], "anchor")
    crew.server.leave(2)
    for rank in (0, 1):
        assert "rank 2 is gone" in str(lost(crew, rank, 2 * every))
    assert torch.equal(owed(crew), e)
    assert torch.equal(kept(crew.replicas[0], "anchor"), kept(crew.replicas[1], "anchor"))
    if "late" not in text:
        assert torch.equal(kept(crew.replicas[0], "anchor"), x)


def lost(crew: ServedCrew, rank: int, steps: int) -> PeerLost | None:
    """What this worker is told in so many steps."""
    try:
        for _ in range(steps):
            step(crew, (rank,))
    except PeerLost as error:
        return error
    return None


@for_each("text", ALL)
def test_all_go_on_together_from_checkpoints_of_one_moment(text: str) -> None:
    """Server and workers both: then they go where they would have gone."""
    crew = averaging(text)
    for _ in range(5):
        step(crew, range(P))
    crew.sync()
    saved = crew.save()
    crew.server.restart()
    states = copy.deepcopy(crew.server.states)
    ends = []
    for again in (False, True):
        if again:
            crew.each(lambda _, replica: replica.session.flush())
            crew.server.states = states
            crew.server.forget_clocks()
            crew.each(lambda rank, replica: replica.load(saved[rank]))
        for _ in range(4):
            step(crew, range(P))
        ends.append([replica.flat.clone() for replica in crew.replicas])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    crew.close()


@for_each("value", [float("nan"), float("inf")])
@for_each("text", ALL)
def test_where_all_wait_for_all_they_are_told_who_is_not_finite_and_apply_nothing(
    text: str, value: float
) -> None:
    crew, every = averaging(text), 2 if "sync_every=2" in text else 1
    for _ in range(2 * every):
        step(crew, range(P))
    if "late" in text:
        crew.sync()
    x, found = kept(crew.replicas[0], "anchor"), [""] * P

    def work(rank: int, replica: Replica) -> None:
        try:
            for _ in range(2 * every):
                if rank == 1:
                    replica.named["c"][5:6].fill_(value)
                replica.progress.after_step()
        except RoundError as error:
            found[rank] = f"{type(error).__name__}: {error}"

    crew.each(work)
    assert len(set(found)) == 1, found
    assert found[0].startswith("NonFinite: NaN or infinity in the parameter c on rank 1")
    assert all(torch.equal(kept(replica, "anchor"), x) for replica in crew.replicas)
    assert bool(owed(crew).isfinite().all()), "a server's checkpoint can still be resumed"


# ---- what cannot be ---------------------------------------------------------------------------------------


def level(text: str = "lowbit", **other: object) -> Strategy:
    (found,) = parse(text).levels
    return replace(found, **other)  # type: ignore[arg-type]


@for_each(
    "star",
    [
        Star(Synchronous(backup_workers=1)),
        Star(Synchronous(backup_workers=1), pull=Blockwise(3)),
        Star(Asynchronous()),
        Star(StaleSynchronous(1)),
        Star(StaleSynchronous(1), pull=Blockwise(3), by_staleness=True),
    ],
    ids=str,
)
def test_servers_that_would_lose_what_is_sent_are_refused(star: Topology) -> None:
    with pytest.raises(
        ConfigError, match=r"pushes that all count: write topology=Star.*lowbit:bound=0 does, or Star"
    ):
        level(topology=star)
    assert level(topology=Star()) is not None


@for_each("merge", [LocalResidual(), ServerParams(whole=False)], ids=str)
def test_merges_that_keep_nothing_of_their_own_are_what_they_were(merge: Merge) -> None:
    star = Star(StaleSynchronous(1), pull=Blockwise(3))
    given = {
        "topology": star,
        "merge": merge,
        "compressor": ErrorFeedback(Blockwise(3)),
        "buffers": "averaged",
        "variance": "local",
    }
    if isinstance(merge, LocalResidual):
        with pytest.raises(ConfigError, match=re.escape("write merge=ServerParams(whole=False)")):
            level(**given)
    else:
        assert level(**given).merge == merge


@for_each(
    ("text", "says"),
    [
        ("lowbit:bound=-1", "bound=-1 is not a whole number, 0 or more"),
        (
            "lowbit:bound=0,topology=all-gather",
            "bound=0 with topology='all-gather' is not possible, as it is for servers",
        ),
        (
            "lowbit:bound=0,predictor=last",
            "bound=0 with a predictor is not possible, as it predicts from answers",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(text)


def test_only_workers_that_may_go_and_come_are_started_alone(tmp_path: object) -> None:
    def run(text: str) -> options.RunOptions:
        return options.check(
            script=("-m", "json.tool"),
            cluster="3x1@100mbit",
            algorithm=text,
            timeout=None,
            out=tmp_path / text.replace(":", "-"),  # type: ignore[operator]
            servers=options.ServerOptions(1),
            restarts=1,
        )

    assert run("lowbit:bound=0").restarts == 1
    with pytest.raises(
        ConfigError, match="--restarts 1 is for workers that go on without each other, and those of lowbit"
    ):
        run("lowbit")


def test_what_it_is_made_of() -> None:
    made = level("lowbit:bound=2,bits=4")
    assert made.independent
    assert made.merge == CommonPoint()
    assert made.topology == Star(StaleSynchronous(2), pull=Blockwise(4))
