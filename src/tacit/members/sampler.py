"""Which sample goes to which member, where members come and go: each one of an epoch to one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler

from tacit.checks import flag, whole
from tacit.errors import CheckpointError


class PresentMembers(Protocol):
    """What a sampler must know of the members: all from the record on which they have agreed last.

    Between what the sampler says for a record and the new `number` no index may be given out.
    """

    @property
    def number(self) -> int:
        """Of the period, which changes with the members."""

    @property
    def place(self) -> int:
        """Of this member among those of the period, from 0."""

    @property
    def size(self) -> int:
        """How many members there are in this period."""

    def told(self) -> Iterable[Mapping[str, Any]]:
        """What the samplers of the last period's members have said last; also of those that are gone.

        In any order; equal on all members, and the same for the whole period.
        """

    def follow(self, says: Callable[[], Mapping[str, Any]]) -> None:
        """Tell the others what `says` returns after each step; the thread that trains calls it."""


@dataclass(frozen=True)
class Left:
    """The positions that nobody has taken, in the sequence of the samples of all epochs, one after the other.

    Attributes:
        frontier: all from here on.
        holes: those before it, rising.
    """

    frontier: int
    holes: Sequence[int] = ()

    def __getitem__(self, index: int) -> int:
        late = index - len(self.holes)
        return self.holes[index] if late < 0 else self.frontier + late

    def before(self, position: int) -> int:
        """How many of them are before this position."""
        return bisect_left(self.holes, position) + max(0, position - self.frontier)

    def after(self, taken: Sequence[int]) -> Left:
        """What is left when each member has taken so many of its share, which is every `len(taken)`-th."""
        size = len(taken)
        end = max((place + size * (n - 1) + 1 for place, n in enumerate(taken) if n), default=0)
        passed_by = sorted(i for place, n in enumerate(taken) for i in range(place + size * n, end, size))
        frontier = self[max(end, len(self.holes))]
        return Left(frontier, [*map(self.__getitem__, passed_by), *self.holes[end:]])

    def told(self) -> list[Any]:
        """As numbers: the frontier, and [first, distance, count] for each row of holes."""
        rows: list[list[int]] = []
        for hole in self.holes:
            first, distance, count = rows[-1] if rows else (0, 0, 0)
            if count == 1 or (count and hole == first + distance * count):
                rows[-1] = [first, hole - first if count == 1 else distance, count + 1]
            else:
                rows.append([hole, 1, 1])
        return [self.frontier, *rows]

    @classmethod
    def of(cls, told: Sequence[Any]) -> Left:
        """As `told` has written it."""
        frontier, *rows = told
        return cls(frontier, [first + distance * i for first, distance, count in rows for i in range(count)])


@dataclass(frozen=True)
class Share:
    """Of one member in one period: `left[place]`, `left[place + size]`, `left[place + 2 * size]`, ..."""

    number: int
    place: int
    size: int
    left: Left

    def __getitem__(self, index: int) -> int:
        return self.left[self.place + self.size * index]


class Alone:
    """The only member there is."""

    number, place, size = 1, 0, 1

    def told(self) -> tuple[()]:
        """Nobody has said anything."""
        return ()

    def follow(self, says: object) -> None:
        """Nobody asks."""


class MemberSampler(Sampler[int]):
    """Gives each sample of an epoch to one member, whoever comes and goes; used as a `DistributedSampler`.

    The samples of all epochs are one sequence, each epoch in an order of its own. Of what is left of it when
    a period of the membership begins, member `i` of `n` gets every `n`-th from `i` on. What members have not
    taken when the period ends is shared out anew, in order, before what follows. So samples of a dead member
    that it had not taken are given out again, and none is given out twice. All this follows from the length,
    the seed and what members have said, so all members find the same.

    Nothing is padded, unlike in `DistributedSampler`: among `n` members the numbers of samples in an epoch
    differ by at most one, so those of steps too. A member that has nothing left in the epoch ends its
    iteration. What others leave of it later comes first in its next epoch. With one member, or as many as
    divide the number of samples, the indices are those of `DistributedSampler`. An epoch that is over, or
    that has been left early, is not given out again: what remains of it comes first in the next one.

    Taken is what has been given out. The workers of a `DataLoader` ask for `num_workers * prefetch_factor`
    batches before they are trained: those of a living member are trained by it, also after a change, and
    those of one that has died or left are lost to the epoch. A member says after each step what it has taken:
    what a dead one has taken since is given out again.

    Args:
        dataset: of which the length is read, once.
        membership: who is there, such as `session.members`; None: one member.
        shuffle: whether each epoch has an order of its own, made of `seed` plus epoch; else that of the data.
        seed: equal on all members.

    Attributes:
        epoch: that is given out, or comes next. For a member that joins, the one at which the others are:
            `for epoch in range(sampler.epoch, epochs)`.

    Raises:
        ConfigError: the dataset is empty, or an argument has another type.
    """

    def __init__(
        self, dataset: Sized, membership: PresentMembers | None = None, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._length = len(dataset)
        whole("len(dataset)", self._length, 1, None, "give a dataset with samples")
        flag("shuffle", shuffle)
        whole("seed", seed, 0, None, "such as 0")
        self._membership: PresentMembers = Alone() if membership is None else membership
        self._shuffle, self._seed = shuffle, seed
        self._first: Left | None = None
        self._share: Share | None = None
        self._taken = 0
        self._given, self._over = 0, False
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self.epoch = 0
        if self._words():
            self.epoch = self._follow()[0] // self._length
        self._membership.follow(self.progress)

    def set_epoch(self, epoch: int) -> None:
        """Give out this epoch next, from 0; without a call the one after the last that has ended."""
        self.epoch, self._given, self._over = epoch, 0, False
        if self._first is None:
            self._share = None  # of the sequence that begins with this epoch

    def __iter__(self) -> Iterator[int]:
        self.epoch += self._over
        self._given, self._over = 0, False
        self._first = self._first or Left(self.epoch * self._length)
        while (index := self._next()) is not None:
            yield index
        self._over = True

    def __len__(self) -> int:
        """Samples of this member in this iteration, if nobody comes or goes from now on."""
        share = self._follow()
        before = share.left.before((self.epoch + 1) * self._length)
        coming = -(-(before - share.place) // share.size) - self._taken
        return self._given + max(0, coming)

    def progress(self) -> dict[str, Any]:
        """What the others must know of this member, as JSON; empty before the first sample of all.

        `{"epoch": that is given out, "taken": samples of its share in this period, ...}`.
        """
        share = self._follow()
        if self._first is None and not self._words():
            return {}
        said = {"number": share.number, "place": share.place, "size": share.size}
        return said | {"epoch": self.epoch, "taken": self._taken, "left": share.left.told()}

    def state_dict(self) -> dict[str, Any]:
        """What is left, as if each member had taken as many of its share as this one: right where all have
        taken equally many steps. Load one member's state on all, also on another number of members.

        With workers, batches that were asked for and not trained count as taken, but for
        `torchdata.stateful_dataloader.StatefulDataLoader`, which calls this for each batch as it asks for it.
        """
        share = self._follow()
        left = share.left.after([self._taken] * share.size)
        return {"length": self._length, "left": left.told()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; where others are in training already, from what they have left.

        Raises:
            CheckpointError: it is of a dataset of another length.
        """
        if state["length"] != self._length:
            raise CheckpointError(
                f"the sampler's state is of {state['length']} samples, and this dataset has {self._length}: "
                "load it with the dataset that it was saved with"
            )
        self._first, self._share = Left.of(state["left"]), None
        self.set_epoch(self._follow()[0] // self._length)

    def _words(self) -> list[Mapping[str, Any]]:
        return [each for each in self._membership.told() if each]

    def _follow(self) -> Share:
        """The share of the period that it is now."""
        now = self._membership
        if self._share is None or self._share.number != now.number:
            self._share, self._taken = Share(now.number, now.place, now.size, self._left()), 0
        return self._share

    def _left(self) -> Left:
        """When this period began."""
        words = self._words()
        if not words:
            return self._first or Left(self.epoch * self._length)
        # What a member has said in an earlier period is not of its share in the last one.
        number = max(each["number"] for each in words)
        last = [each for each in words if each["number"] == number]
        taken = [0] * last[0]["size"]
        for each in last:
            taken[each["place"]] = each["taken"]
        return Left.of(last[0]["left"]).after(taken)

    def _next(self) -> int | None:
        epoch, offset = divmod(self._follow()[self._taken], self._length)
        if epoch > self.epoch:
            return None
        self._taken += 1
        self._given += 1
        return int(self._order_of(epoch)[offset])

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._order[0] != epoch:
            order: Any = range(self._length)
            if self._shuffle:
                random = torch.Generator().manual_seed(self._seed + epoch)
                order = torch.randperm(self._length, generator=random).numpy()
            self._order = (epoch, order)
        return self._order[1]
