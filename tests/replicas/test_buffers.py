"""Buffers of replicas that move on their own, whatever becomes of the parameters: all in one process."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batchnorm_replicas import Member, Normed
from torch import Tensor, nn

import tacit.merges
from cases import for_each
from tacit.compressors import QSGD, ErrorFeedback, Sign, TopK
from tacit.contracts import Merge
from tacit.errors import AttachError, NonFinite
from tacit.merges import (
    Average,
    CommonPoint,
    EagerStep,
    Elastic,
    LocalResidual,
    Mix,
    OuterStep,
    Replace,
    ServerParams,
    SlowMo,
    StaleMean,
)
from tacit.overlap import Delayed
from tacit.rounds import Cycling, Every
from tacit.strategy import Strategy
from tacit.topologies import Asynchronous, Flat, Gossip, Star


def progress(merge: Merge, lag: int = 0, every: int = 4, **more: object) -> Strategy:
    late = {"overlap": Delayed(lag)} if lag else {}
    return Strategy(subject="delta", rounds=Every(every), merge=merge, **late, **more)  # type: ignore[arg-type]


STEPPING = OuterStep(1.6, 0.95)
"""An outer optimizer that goes far beyond the mean."""

WAYS: dict[str, Strategy] = {
    "average": progress(Average()),
    "average, every step": progress(Average(), every=1),
    "average, late": progress(Average(), 3),
    "average, a step late": progress(Average(), 1, 1),
    "average, as late as can be": progress(Average(), 4),
    "average, sparse": progress(Average(), compressor=ErrorFeedback(TopK(ratio=0.1))),
    "average, by signs": progress(Average(), compressor=ErrorFeedback(Sign())),
    "keep": progress(LocalResidual(), compressor=TopK(ratio=0.3), topology=Flat()),
    "keep, to the common point": progress(CommonPoint(), compressor=TopK(ratio=0.3), topology=Flat()),
    "keep, to the common point, late": progress(CommonPoint(), 1, 2),
    "stale mean": Strategy(
        subject="delta", rounds=Cycling(3, warmup_epochs=1, cooldown_epochs=0), merge=StaleMean()
    ),
    "stale mean, every step": Strategy(
        subject="delta", rounds=Cycling(1, warmup_epochs=0, cooldown_epochs=0), merge=StaleMean()
    ),
    "outer step": progress(STEPPING),
    "outer step, late": progress(STEPPING, 2),
    "outer step, partly": progress(OuterStep(1.6, 0.95, local=0.5), 4),
    "outer step, without momentum": progress(OuterStep(1.9, 0.0)),
    "outer step, eager": progress(EagerStep(1.6, 0.5, period=4), 4),
    "outer step, in fragments": Strategy(
        subject="delta", rounds=Every(6, fragments=3), overlap=Delayed(2), merge=STEPPING
    ),
    "slow momentum": progress(SlowMo(1.6, 0.95)),
    "elastic": progress(Elastic(0.9)),
    "elastic, beyond the mean": progress(Elastic(1.9)),
    "elastic, late": progress(Elastic(1.9), 2),
    "mix": progress(Mix(), topology=Gossip("ring")),
    "mix, late": progress(Mix(), 1, 2, topology=Gossip("one-peer")),
    "adopt": progress(ServerParams(), every=1, topology=Star(Asynchronous())),
    "adopt, every third step": progress(ServerParams(), every=3, topology=Star(Asynchronous())),
    "adopt, differences": progress(
        ServerParams(whole=False), every=1, topology=Star(Asynchronous(), pull=ErrorFeedback(Sign()))
    ),
    "adopt, late": progress(ServerParams(), 1, 2, topology=Star(Asynchronous())),
}


def test_every_merge_is_there() -> None:
    there = {type(strategy.merge) for strategy in WAYS.values()}
    every = {getattr(tacit.merges, name) for name in tacit.merges.__all__}
    assert there == {each for each in every if issubclass(each, Merge)} - {Replace}


@pytest.mark.parametrize("way", WAYS)
@for_each("variance", [0.02, 1e-4])
def test_a_variance_is_never_below_zero_and_the_model_can_always_be_evaluated(
    way: str, variance: float
) -> None:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    crew = Normed(WAYS[way], schedule_state={"steps_per_epoch": 8.0, "epochs": 6.0})

    def look(rank: int, step: int, module: nn.Module) -> None:
        least = float(module[1].running_var.min())  # type: ignore[index, operator, union-attr]
        assert least >= 0, f"rank {rank}, step {step}: {least}"
        module.eval()
        with torch.no_grad():
            assert bool(module(x).isfinite().all()), f"rank {rank}, step {step}"
        module.train()

    crew.train(36, look, spread=3 * math.sqrt(variance))
    apart = WAYS[way].independent
    if not apart:
        crew.sync()
    crew.close()
    first, *others = [norm(member) for member in crew.members]
    assert float(first.running_var.min()) >= 0
    if not apart:
        assert all(torch.equal(first.running_var, each.running_var) for each in others)
        assert all(torch.equal(first.num_batches_tracked, each.num_batches_tracked) for each in others)
        told = float(first.running_var.mean())
        seen = true_variance(crew, math.sqrt(variance) * 3)
        assert told == pytest.approx(seen, rel=1.0, abs=0.2), "it does not follow the batches"


def test_a_variance_that_a_server_has_below_zero_is_zero_here() -> None:
    """Workers take off their shares of a variance that others have taken off already."""
    crew = Normed(WAYS["adopt"], 2)
    ahead, behind = crew.members
    for member in (*[ahead] * 12, behind):
        norm(member).running_var.zero_()
        member.progress.after_step()
    there = behind.progress.saved_state()["1.running_var", "anchor"].tensor
    assert float(there.max()) < -0.4
    assert float(norm(behind).running_var.min()) == 0
    for _ in range(12):
        norm(behind).running_var.fill_(0.1)
        behind.progress.after_step()
    assert float(there.min()) == pytest.approx(0.1, abs=0.01), "and comes back"
    crew.close()


def norm(member: Member) -> Any:
    return member.module[1]  # type: ignore[index]


def true_variance(crew: Normed, spread: float) -> float:
    """Of what BatchNorm is given, by the model as it ended."""
    x = spread * torch.randn(4000, 6, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float(crew.members[0].module[0](x).var(0).mean())  # type: ignore[index, operator]


# ---- what travels -------------------------------------------------------------------------------------


class Holding(nn.Module):
    """A layer, and the buffers that a test gives it."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer.clone())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).relu())
        return y


def held(crew: Normed, name: str) -> list[Tensor]:
    return [getattr(member.module, name).clone() for member in crew.members]


def sent(crew: Normed) -> list[int]:
    return [record.bytes_out for record in crew.members[0].session.stats.records]


def put(crew: Normed, name: str, value: Callable[[int], Tensor]) -> None:
    for rank, member in enumerate(crew.members):
        setattr(member.module, name, value(rank))


def test_what_has_not_changed_does_not_travel_and_what_has_does() -> None:
    constant = {"mask": torch.full((50, 50), -torch.inf).triu(1), "table": torch.randn(40, 50)}
    plain, holding = (
        Normed(progress(Average(), every=1), make=lambda held=held: Holding(**held))
        for held in ({"x": torch.zeros(10)}, {"x": torch.zeros(10), **constant})
    )
    for crew in (plain, holding):
        crew.train(2)
        put(crew, "x", lambda rank: torch.full((10,), float(rank)))
        crew.train(1)
        put(crew, "x", lambda rank: torch.full((10,), 1.0 + rank))
        crew.train(2)
        crew.close()
        for x in held(crew, "x"):
            torch.testing.assert_close(x, torch.full((10,), 2.0))
    for name, before in constant.items():
        assert all(torch.equal(now, before) for now in held(holding, name))
    flags = [theirs - ours for ours, theirs in zip(sent(plain), sent(holding), strict=True)]
    assert flags == pytest.approx([4 / 3 * 2 * 2 * 4] * 5, abs=1), "two numbers for each buffer"
    first, second, begins, goes_on, ends = sent(plain)
    assert (second, ends) == (first, goes_on)
    # With one number more: where a NaN began, if there was one.
    assert begins - first == 2 * (10 + 1) * 4, "an all-gather, as it had not moved before"
    assert goes_on - first == pytest.approx(4 / 3 * 10 * 4, abs=4), "within the one message"


def test_a_buffer_that_one_rank_alone_has_changed_counts_for_what_it_is_on_the_others() -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(x=torch.ones(3)))
    crew.train(1)
    crew.members[1].module.x += 3.0
    crew.train(1)
    assert all(torch.equal(x, torch.full((3,), 2.0)) for x in held(crew, "x"))
    crew.members[2].module.x -= 3.0  # and once more, now in the first message
    crew.train(1)
    assert all(torch.equal(x, torch.full((3,), 1.0)) for x in held(crew, "x"))
    crew.close()


def test_matrices_travel_densely_whatever_compresses_the_parameters() -> None:
    for compressor in (ErrorFeedback(TopK(ratio=0.01)), QSGD(bits=2)):
        strategy = progress(Average(), every=1, compressor=compressor)
        crew = Normed(strategy, make=lambda: Holding(x=torch.zeros(20, 30)))
        for seed in range(3):
            values = [
                torch.randn(20, 30, generator=torch.Generator().manual_seed(seed + r)) for r in range(3)
            ]
            put(crew, "x", lambda rank, values=values: values[rank])
            crew.train(1)
            for x in held(crew, "x"):
                torch.testing.assert_close(x, torch.stack(values).mean(0))
        crew.close()


def test_weights_count_for_buffers_too() -> None:
    crew = Normed(
        progress(Average(), every=1),
        make=lambda: Holding(x=torch.zeros(2), low=torch.full((2,), torch.inf)),
        share=lambda rank: (0.5, 1.0, 1.5)[rank],
    )
    for _ in range(2):
        put(crew, "x", lambda rank: torch.tensor([float(rank), 0.0]))
        put(crew, "low", lambda rank: torch.tensor([torch.inf, float(rank)]))
        crew.train(1)
        for x, low in zip(held(crew, "x"), held(crew, "low"), strict=True):
            torch.testing.assert_close(x, torch.tensor([(0 * 0.5 + 1 * 1.0 + 2 * 1.5) / 3, 0.0]))
            torch.testing.assert_close(low, torch.tensor([torch.inf, (1 * 1.0 + 2 * 1.5) / 3]))
    crew.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_of_every_type_the_mean_is_taken(dtype: torch.dtype) -> None:
    crew = Normed(
        progress(Average(), every=1), make=lambda: Holding(x=torch.zeros(4, dtype=dtype), y=torch.ones(2))
    )
    for _ in range(2):
        put(crew, "x", lambda rank: torch.tensor([1.0, 3.0 * rank, 30000.0, 2.0**-10]).to(dtype))
        crew.train(1)
        expected = torch.tensor([1.0, 3.0, 30000.0, 2.0**-10]).to(dtype)
        assert all(torch.equal(x, expected) for x in held(crew, "x"))
    crew.close()


def test_a_mean_that_comes_late_is_met_halfway() -> None:
    crew = Normed(progress(OuterStep(), 2, 4), make=lambda: Holding(x=torch.zeros(2)))
    crew.train(3)
    put(crew, "x", lambda rank: torch.tensor([float(rank), 8.0]))
    crew.train(1)  # it leaves: 1, 8
    put(crew, "x", lambda rank: torch.tensor([10.0 * rank, 8.0]))
    crew.train(1)
    assert [float(x[0]) for x in held(crew, "x")] == [0.0, 10.0, 20.0]
    crew.train(1)
    assert [x.tolist() for x in held(crew, "x")] == [[0.5, 8.0], [5.5, 8.0], [10.5, 8.0]]
    crew.sync()
    assert [x.tolist() for x in held(crew, "x")] == [[5.5, 8.0]] * 3
    crew.close()


@pytest.mark.parametrize("way", ["average", "average, late", "outer step, in fragments", "elastic"])
def test_bytes_are_counted_once_in_training_and_in_closing(way: str) -> None:
    crew = Normed(WAYS[way])

    def told(key: str) -> list[float]:
        return [member.session.metrics()[key] for member in crew.members]

    crew.train(9)
    crew.sync()
    crew.train(9)
    for member in crew.members:
        member.session.flush()
    trained = [*crew.net.sent]
    assert told("bytes_out") == trained
    assert told("closing_bytes_out") == [0] * 3
    for member in crew.members:
        member.session.stats.begin_closing()
    crew.sync()
    assert told("bytes_out") == trained
    closing = [all_ - before for all_, before in zip(crew.net.sent, trained, strict=True)]
    assert told("closing_bytes_out") == closing
    assert min(closing) > 0
    crew.close()


# ---- what is not finite -------------------------------------------------------------------------------


def test_infinities_that_are_the_same_everywhere_stay_and_the_rest_is_averaged() -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(x=torch.full((3,), torch.inf)))
    for start in (0.0, 3.0):
        put(crew, "x", lambda rank, start=start: torch.tensor([torch.inf, -torch.inf, start + rank]))
        crew.train(1)
        assert [x.tolist() for x in held(crew, "x")] == [[torch.inf, -torch.inf, start + 1]] * 3
    crew.close()


def test_nan_that_was_there_at_first_stays() -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(x=torch.tensor([torch.nan, 0.0])))
    put(crew, "x", lambda rank: torch.tensor([torch.nan, float(rank)]))
    crew.train(2)
    assert all(math.isnan(x[0]) and x[1] == 1.0 for x in held(crew, "x"))
    crew.close()


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        ((0.0, torch.nan, 0.0), "1"),
        ((torch.nan,) * 3, "0, 1, 2"),
        ((0.0, 0.0, torch.inf), "2"),
        ((torch.inf, -torch.inf, torch.inf), "0, 1, 2"),
    ],
)
@pytest.mark.parametrize("lag", [0, 1])
def test_what_becomes_infinite_is_named_with_its_ranks(
    given: tuple[float, ...], ranks: str, lag: int
) -> None:
    crew = Normed(progress(Average(), lag, 2), make=lambda: Holding(x=torch.zeros(3), y=torch.ones(4)))
    crew.train(1)
    put(crew, "x", lambda rank: torch.tensor([0.0, given[rank], 1.0]))
    with pytest.raises(
        NonFinite, match=re.escape(f"NaN or infinity in the buffer x on rank {ranks}, in step 1:")
    ):
        crew.train(2)
    assert [float(x[2]) for x in held(crew, "x")] == [1.0] * 3
    assert all(torch.equal(y, torch.ones(4)) for y in held(crew, "y"))


# ---- what has no mean ---------------------------------------------------------------------------------


def test_counters_are_each_ranks_own_until_all_agree_on_the_first_ones() -> None:
    def make() -> nn.Module:
        return Holding(
            count=torch.zeros((), dtype=torch.long),
            flags=torch.zeros(3, dtype=torch.bool),
            turns=torch.zeros(2, dtype=torch.complex64),
            same=torch.arange(4),
        )

    for merge in (Average(), LocalResidual(), Elastic()):
        crew = Normed(progress(merge, every=1), make=make)
        for rank, member in enumerate(crew.members):
            member.module.count += 5 + rank
            member.module.flags[rank] = True
            member.module.turns[1] = complex(rank + 1, 2)
        crew.train(2)
        assert [int(count) for count in held(crew, "count")] == [5, 6, 7]
        crew.sync()
        assert [int(count) for count in held(crew, "count")] == [5, 5, 5]
        assert [flags.tolist() for flags in held(crew, "flags")] == [[True, False, False]] * 3
        assert [turns.tolist() for turns in held(crew, "turns")] == [[0, 1 + 2j]] * 3
        turns = crew.members[0].session.context.transport._turns  # type: ignore[attr-defined]
        before = turns.total()
        crew.sync()
        assert turns.total() == before + 1, "they see that they agree, and no more"
        crew.close()


def test_a_counter_that_has_another_size_on_another_rank_is_left_alone_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(seen=torch.zeros(2, dtype=torch.long)))
    put(crew, "seen", lambda rank: torch.arange(2 + rank))
    crew.train(1)
    crew.sync()
    assert [len(seen) for seen in held(crew, "seen")] == [2, 3, 4]
    assert "buffer seen has another shape or type on other ranks: each keeps its own" in caplog.text
    crew.close()


# ---- where they are -----------------------------------------------------------------------------------


def test_a_buffer_is_looked_up_in_each_round_and_may_change_its_type() -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(x=torch.zeros(2, 3)))
    for make in (torch.zeros(2, 3), torch.zeros(3, 2).T, torch.zeros(2, 3, dtype=torch.float64)):
        put(crew, "x", lambda rank, make=make: make.clone() + torch.arange(6.0).view(2, 3) + rank)
        crew.train(1)
        expected = (torch.arange(6.0).view(2, 3) + 1).to(make.dtype)
        assert all(torch.equal(x, expected) for x in held(crew, "x"))
    crew.close()


def test_a_buffer_that_is_no_tensor_any_more_is_refused() -> None:
    crew = Normed(progress(Average(), every=1), make=lambda: Holding(x=torch.zeros(2)))
    put(crew, "x", lambda rank: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(AttachError, match="x was a tensor when the session began, and is None now"):
        crew.train(1)


# ---- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if "adopt" not in way])
def test_a_run_that_is_resumed_is_the_run_that_never_stopped(way: str) -> None:
    schedule_state = {"steps_per_epoch": 8.0, "epochs": 6.0}
    straight, saving = (Normed(WAYS[way], schedule_state=schedule_state) for _ in range(2))
    straight.train(24)
    saved: dict[int, list[dict[str, object]]] = {}
    for stop in (5, 7, 9):
        saving.train(stop - saving.members[0].session.step)
        saved[stop] = [member.save() for member in saving.members]
    saving.train(24 - 9)
    for crew in (straight, saving):
        crew.sync()
        crew.close()

    def is_straight(crew: Normed) -> None:
        for member, other in zip(straight.members, crew.members, strict=True):
            there = other.module.state_dict()
            for name, value in member.module.state_dict().items():
                assert torch.equal(value, there[name]), name

    is_straight(saving)

    @for_each("stop", saved)
    def is_resumed(stop: int) -> None:
        resumed = Normed(WAYS[way], schedule_state=schedule_state)
        resumed.each(lambda rank, member: member.load(saved[stop][rank]))
        resumed.train(24 - stop)
        resumed.sync()
        resumed.close()
        is_straight(resumed)

    is_resumed()


def test_a_network_without_buffers_says_nothing_more() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 3)

    crew = Normed(progress(Average(), every=1), make=make)
    crew.train(2)
    crew.sync()
    crew.close()
    (first, *_) = sent(crew)
    assert first == pytest.approx(4 / 3 * 4 * 21, abs=8)
