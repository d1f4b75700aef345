"""Parameters of two bytes: what is below a unit in their last place adds up all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from replica_threads import Crew
from torch import Tensor

from cases import for_each
from tacit.compressors import ErrorFeedback, TopK
from tacit.merges import Average, Elastic, LocalResidual, OuterStep, SlowMo, StaleMean
from tacit.overlap import Delayed
from tacit.rounds import Cycling, Every
from tacit.strategy import Strategy
from tacit.topologies import Flat

HALVES = (torch.bfloat16, torch.float16)
SIZES = {"a": 20, "b": 12}


def progress(merge: object, lag: int = 0, every: int = 1, **more: object) -> Strategy:
    late = {"overlap": Delayed(lag)} if lag else {}
    return Strategy(subject="delta", rounds=Every(every), merge=merge, **late, **more)  # type: ignore[arg-type]


DASO = Strategy(subject="delta", rounds=Cycling(3, warmup_epochs=0, cooldown_epochs=0), merge=StaleMean())
MEMORY = {"steps_per_epoch": 12.0, "epochs": 100.0}

WAYS = {
    "average": progress(Average()),
    "average, late": progress(Average(), 2, 3),
    "diloco": progress(OuterStep(0.7, 0.9), every=2),
    "outer step, partly": progress(OuterStep(0.4, 0.9, local=0.5), 2, 3),
    "slow momentum": progress(SlowMo(1.0, 0.7), every=2),
    "elastic": progress(Elastic(0.9)),
    "keep": progress(LocalResidual(), compressor=TopK(ratio=0.5), topology=Flat()),
    "stale mean": DASO,
}


def crew_of(strategy: Strategy, dtype: torch.dtype, peers: int = 4) -> Crew:
    return Crew(strategy, peers, schedule_state=MEMORY, sizes=SIZES, dtype=dtype, start=1.5)


def run(crew: Crew, steps: int, step_: Callable[[int, int, Tensor], None]) -> list[Tensor]:
    """Each replica's parameters move by `step_(rank, step, parameters)`, in their own type."""

    def work(rank: int, replica: object) -> None:
        for _ in range(steps):
            for p in replica.named.values():  # type: ignore[attr-defined]
                step_(rank, replica.session.step, p)  # type: ignore[attr-defined]
            replica.progress.observations.observe(1.0)  # type: ignore[attr-defined]
            replica.progress.after_step()  # type: ignore[attr-defined]

    crew.each(work)
    return [replica.flat.clone() for replica in crew.replicas]


@for_each("dtype", HALVES)
@for_each("way", WAYS)
def test_what_one_rank_in_eight_does_arrives(way: str, dtype: torch.dtype) -> None:
    """It takes the smallest step that its type can tell; the mean of that is an eighth of such a step."""
    unit = torch.finfo(dtype).eps  # between 1 and the next larger number; up to 2 they are as far apart
    steps = 48

    def one_moves(rank: int, step: int, p: Tensor) -> None:
        if rank == 3:
            p.add_(unit)  # what the smallest step is that its optimizer can take

    found = {}
    for kind in (dtype, torch.float32):
        crew = crew_of(WAYS[way], kind, peers=8)
        run(crew, steps, one_moves)
        crew.sync()
        found[kind] = crew.replicas[0].flat.double()
        crew.close()
    moved = found[torch.float32] - 1.5
    assert float(moved.min()) > 4 * unit
    assert bool(((found[dtype] - 1.5 - moved).abs() <= 0.15 * moved + unit).all()), (
        found[dtype],
        found[torch.float32],
    )


@pytest.mark.parametrize("dtype", HALVES)
def test_diloco_is_that_of_float32_to_rounding(dtype: torch.dtype) -> None:
    """Of replicas whose steps both types can tell, in a range where the grid stays the same."""
    unit = torch.finfo(dtype).eps
    signs = [
        torch.randint(-1, 2, (400, 20), generator=torch.Generator().manual_seed(r)).float() for r in range(4)
    ]

    def walk(rank: int, step: int, p: Tensor) -> None:
        p.add_((unit * signs[rank][step][: len(p)]).to(p.dtype))

    found = {}
    for kind in (dtype, torch.float32):
        crew = crew_of(progress(OuterStep(0.3, 0.8), every=4), kind)
        found[kind] = run(crew, 200, walk)[0].double()
        crew.close()
    apart = float((found[dtype] - found[torch.float32]).abs().max())
    travelled = float((found[torch.float32] - 1.5).abs().max())
    assert travelled > 4 * unit
    assert apart <= 0.51 * unit, apart / unit


@pytest.mark.parametrize("dtype", HALVES)
def test_nothing_moves_where_nobody_does(dtype: torch.dtype) -> None:
    """The anchor is between two numbers of the type, and is not pulled to either."""
    crew = crew_of(progress(OuterStep(0.7, 0.0)), dtype, peers=3)
    unit = torch.finfo(dtype).eps
    run(crew, 1, lambda rank, step, p: p.add_(unit) if rank == 0 else p)
    (first, *_), parameters = crew.replicas, [replica.flat.clone() for replica in crew.replicas]
    common = [each.clone() for each in first.progress._anchor]
    run(crew, 20, lambda rank, step, p: p)
    assert all(torch.equal(a, b) for a, b in zip(common, first.progress._anchor, strict=True))
    assert all(torch.equal(a, replica.flat) for a, replica in zip(parameters, crew.replicas, strict=True))
    crew.sync()
    assert all(torch.equal(a, b) for a, b in zip(common, first.progress._anchor, strict=True))
    crew.close()


@for_each("dtype", HALVES)
@for_each("way", WAYS)
def test_what_travels_is_of_the_parameters_type(way: str, dtype: torch.dtype) -> None:
    sent = {}
    for kind in (dtype, torch.float32):
        crew = crew_of(WAYS[way], kind)
        run(crew, 7, lambda rank, step, p: p.mul_(0.99))
        assert all(bucket.dtype == kind for bucket in crew.replicas[0].session.buckets)
        sent[kind] = crew.replicas[0].session.stats.totals.bytes_out
        crew.close()
    assert sent[dtype] <= 0.5 * sent[torch.float32] * (1.6 if "keep" in way else 1.1) + 50  # positions stay


@for_each("dtype", HALVES)
@for_each("way", WAYS)
@for_each("stop", [5, 8])
def test_a_checkpoint_holds_what_rounding_took_away(way: str, dtype: torch.dtype, stop: int) -> None:
    unit = torch.finfo(dtype).eps

    def moves(rank: int, step: int, p: Tensor) -> None:
        p.add_(unit * (rank == step % 4))

    straight, saving, resumed = (crew_of(WAYS[way], dtype) for _ in range(3))
    run(straight, 20, moves)
    run(saving, stop, moves)
    saved = [replica.save() for replica in saving.replicas]
    assert any(t.dtype == torch.float32 for k, t in saved[0].items() if k.endswith("/anchor"))  # type: ignore[attr-defined]
    run(saving, 20 - stop, moves)
    resumed.each(lambda rank, replica: replica.load(saved[rank]))
    run(resumed, 20 - stop, moves)
    for crew in (saving, resumed):
        for mine, theirs in zip(crew.replicas, straight.replicas, strict=True):
            assert torch.equal(mine.flat, theirs.flat)
            then = zip(mine.progress._anchor, theirs.progress._anchor, strict=True)
            assert all(torch.equal(a, b) for a, b in then)
    for crew in (straight, saving, resumed):
        crew.sync()
        crew.close()


def test_error_feedback_goes_with_it() -> None:
    strategy = replace(WAYS["diloco"], compressor=ErrorFeedback(TopK(ratio=0.3)))
    crew = crew_of(strategy, torch.bfloat16)
    ends = run(crew, 12, lambda rank, step, p: p.add_(0.01 * (rank + 1)))
    assert all(torch.equal(ends[0], each) for each in ends)
    assert float(ends[0].float().mean()) > 1.52
    crew.close()
