"""Learning rates that follow the batch, and batches that take the place of a learning rate's decay."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, MultiStepLR
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from tacit import GrowingBatches, scale_lr
from tacit.errors import ConfigError


def optimizer(*rates: float) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in rates])


def rates(made: SGD, schedule: object, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        found.append([group["lr"] for group in made.param_groups])
        made.step()
        schedule.step()  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("rule", "factor"), [("linear", 16.0), ("sqrt", 4.0)])
def test_the_rate_rises_evenly_from_the_small_batchs_to_the_large_ones(rule: str, factor: float) -> None:
    made = optimizer(0.1, 0.02)
    found = rates(made, scale_lr(made, 16, warmup_steps=5, rule=rule), 8)  # type: ignore[arg-type]
    for group, base in enumerate((0.1, 0.02)):
        risen = [base * (1 + (factor - 1) * min(step, 5) / 5) for step in range(8)]
        assert [each[group] for each in found] == pytest.approx(risen)


def test_a_decay_is_chained_to_it_and_counts_from_the_same_beginning() -> None:
    made = optimizer(0.1)
    schedule = ChainedScheduler([scale_lr(made, 8, warmup_steps=2), MultiStepLR(made, [4, 6], gamma=0.1)])
    found = [each for (each,) in rates(made, schedule, 8)]
    assert found == pytest.approx([0.1, 0.45, 0.8, 0.8, 0.08, 0.08, 0.008, 0.008])


def test_without_warm_up_the_rate_is_the_large_batchs_at_once() -> None:
    made = optimizer(0.1)
    assert rates(made, scale_lr(made, 4, warmup_steps=0), 3) == [[0.4]] * 3


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: scale_lr(o, 0.5, warmup_steps=5), "batch_ratio=0.5 is not possible"),
        (lambda o: scale_lr(o, float("inf"), warmup_steps=5), "batch_ratio=inf"),
        (lambda o: scale_lr(o, 8, warmup_steps=-1), "warmup_steps=-1 is not possible"),
        (lambda o: scale_lr(o, 8, warmup_steps=2.5), "warmup_steps=2.5 is not possible"),
        (lambda o: scale_lr(o, 8, warmup_steps=5, rule="cube"), "unknown rule 'cube'.*linear, sqrt"),
        (lambda o: (MultiStepLR(o, [3]), scale_lr(o, 8, warmup_steps=5)), "has a scheduler already"),
    ],
)
def test_scaling_that_cannot_be_is_refused(make: Callable[[SGD], object], says: str) -> None:
    made = optimizer(0.1)
    with pytest.raises(ConfigError, match=says):
        make(made)
    assert made.param_groups[0]["lr"] == 0.1


def test_batches_grow_at_the_milestones_and_hold_every_sample_once() -> None:
    data = list(range(100))
    batches = GrowingBatches(RandomSampler(data), 10, [1, 3], factor=2.0, drop_last=False)
    loader = DataLoader(data, batch_sampler=batches, collate_fn=list)
    sizes = []
    for epoch in range(5):
        batches.set_epoch(epoch)
        found = [*loader]
        assert len(found) == len(batches) == len(loader)
        assert sorted(index for batch in found for index in batch) == data
        sizes.append([len(batch) for batch in found])
    assert sizes == [[10] * 10, [20] * 5, [20] * 5, [40, 40, 20], [40, 40, 20]]


def test_ranks_have_equally_many_batches_of_different_samples() -> None:
    ranks = [
        GrowingBatches(
            DistributedSampler(range(101), num_replicas=4, rank=rank, drop_last=True), 4, [1], factor=3.0
        )
        for rank in range(4)
    ]
    before: list[list[int]] = []
    for epoch, (size, count) in enumerate([(4, 6), (12, 2)]):
        for each in ranks:
            each.set_epoch(epoch)
        found = [[*each] for each in ranks]
        assert [len(each) for each in found] == [count] * 4
        assert {len(batch) for each in found for batch in each} == {size}
        samples = [index for each in found for batch in each for index in batch]
        assert len(samples) == len(set(samples))
        assert found[0] != before  # shuffled anew
        before = found[0]


def test_where_the_batch_cannot_grow_the_rate_falls() -> None:
    batches = GrowingBatches(SequentialSampler(range(1000)), 32, [2, 4, 6], factor=5.0, max_batch=256)
    made = optimizer(0.1)
    schedule = LambdaLR(made, batches.lr_factor)
    noise = []
    for epoch in range(8):
        batches.set_epoch(epoch)
        noise.append(made.param_groups[0]["lr"] / batches.batch_size)
        made.step()
        schedule.step()
    decayed = [0.1 / 32 / 5.0 ** sum(epoch >= each for each in (2, 4, 6)) for epoch in range(8)]
    assert noise == pytest.approx(decayed)
    assert batches.batch_size == 256


def test_a_factor_that_is_not_exact_loses_no_sample() -> None:
    batches = GrowingBatches(SequentialSampler(range(9000)), 7, [1, 2, 3], factor=1 / 0.1)
    sizes = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        sizes.append(batches.batch_size)
    assert sizes == [7, 70, 700, 7000]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size=0 is not possible"),
        ({"milestones": [3, 3]}, "no rising epochs"),
        ({"milestones": [0]}, "no rising epochs"),
        ({"factor": 1.0}, "does not let batches grow"),
        ({"max_batch": 4}, "max_batch=4 is below batch_size=8"),
        ({"sampler": 7}, "no sampler of known length"),
        ({"sampler": iter([1])}, "no sampler of known length"),
    ],
)
def test_growth_that_cannot_be_is_refused(options: dict[str, object], says: str) -> None:
    given: dict[str, object] = {"sampler": range(20), "batch_size": 8, "milestones": [2]} | options
    with pytest.raises(ConfigError, match=says):
        GrowingBatches(**given)  # type: ignore[arg-type]
