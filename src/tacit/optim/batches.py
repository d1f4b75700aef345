"""Batches that grow where the learning rate would fall (Smith, Kindermans, Ying & Le, ICLR 2018)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized

from torch.utils.data import Sampler

from tacit.errors import ConfigError


class GrowingBatches(Sampler[list[int]]):
    """A batch sampler whose batches become `factor` times as large at every milestone (arXiv 1711.00489).

    Where a schedule would multiply the learning rate by 1 / `factor`, the batch grows by `factor` instead:
    the noise of the steps falls equally, and there are fewer steps, so fewer rounds. Give it to
    `DataLoader(data, batch_sampler=batches)`, and call `set_epoch` before every epoch. Sizes are those of one
    rank, so give it a `DistributedSampler(..., drop_last=True)`: then all ranks have equally many batches.

    Beyond `max_batch` the batch stays, and the learning rate must fall after all (section 5.2 of the paper):
    `LambdaLR(optimizer, batches.lr_factor)`, stepped once an epoch. It makes up for batches rounded down to
    whole samples too.

    Args:
        sampler: gives the indices; its `set_epoch` is called where it has one.
        batch_size: before the first milestone.
        milestones: the epochs (from 0) at whose beginning the batch grows, rising.
        factor: by how much; 1 / gamma of the schedule that it takes the place of. Above 1.
        max_batch: the largest batch, such as what fits into memory; None: no limit.
        drop_last: leave out the last batch where it is not full, as it would weigh more than others.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        sampler: Iterable[int],
        batch_size: int,
        milestones: Sequence[int],
        *,
        factor: float = 10.0,
        max_batch: int | None = None,
        drop_last: bool = True,
    ) -> None:
        _check(sampler, batch_size, milestones, factor, max_batch)
        self.sampler = sampler
        self.milestones, self.factor = tuple(milestones), factor
        self.first, self.max_batch, self.drop_last = batch_size, max_batch, drop_last
        self.epoch = 0

    @property
    def batch_size(self) -> int:
        """Samples in a batch of this epoch."""
        return self._size(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, counted from 0: a DistributedSampler inside shuffles anew too."""
        self.epoch = epoch
        inner = getattr(self.sampler, "set_epoch", None)
        if inner is not None:
            inner(epoch)

    def lr_factor(self, epoch: int) -> float:
        """What to multiply the learning rate by in this epoch, as the batch is smaller than it should be."""
        return self._size(epoch) / self._wanted(epoch)

    def _wanted(self, epoch: int) -> float:
        return self.first * self.factor ** sum(epoch >= each for each in self.milestones)

    def _size(self, epoch: int) -> int:
        # Not 79 for 79.9999999: a factor such as 1 / 0.1 need not be exact.
        wanted = int(self._wanted(epoch) * (1 + 1e-9))
        return wanted if self.max_batch is None else min(wanted, self.max_batch)

    def __len__(self) -> int:
        """The number of batches in this epoch."""
        assert isinstance(self.sampler, Sized)
        count = len(self.sampler)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        size, batch = self.batch_size, list[int]()
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch


def _check(
    sampler: object, batch_size: int, milestones: Sequence[int], factor: float, max_batch: int | None
) -> None:
    if not isinstance(sampler, Iterable) or not isinstance(sampler, Sized):
        raise ConfigError(
            f"sampler={sampler!r} is no sampler of known length: write DistributedSampler(data, "
            "drop_last=True), or RandomSampler(data) on one rank"
        )
    if type(batch_size) is not int or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r} is not possible: write a whole number of 1 or more")
    if list(milestones) != sorted(set(milestones)) or any(type(m) is not int or m < 1 for m in milestones):
        raise ConfigError(
            f"milestones={milestones!r} are no rising epochs above 0: write such as [30, 60, 80]"
        )
    if not (factor > 1 and math.isfinite(factor)):
        raise ConfigError(
            f"factor={factor} does not let batches grow: write 1 / gamma of the schedule, such as 10"
        )
    if max_batch is not None and (type(max_batch) is not int or max_batch < batch_size):
        raise ConfigError(f"max_batch={max_batch!r} is below batch_size={batch_size}: write a larger one")
