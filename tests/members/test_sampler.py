"""Each sample goes to one member, whoever comes and goes."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tacit.errors import CheckpointError, ConfigError
from tacit.members.sampler import Left, MemberSampler


@dataclass
class Record:
    """On which all members have agreed last."""

    number: int = 1
    order: list["Member"] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


@dataclass
class Member:
    """One of those that share a record, with its sampler."""

    record: Record
    word: str = "{}"
    taken: list[int] = field(default_factory=list)
    unsaid: int = 0

    def begin(self, length: int, seed: int = 0, state: Any = None) -> None:
        self.sampler = MemberSampler(range(length), self, seed=seed)
        if state:
            self.sampler.load_state_dict(state)
        self.stream = self.samples()

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def place(self) -> int:
        return [each is self for each in self.record.order].index(True)

    @property
    def size(self) -> int:
        return len(self.record.order)

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(each) for each in self.record.words]

    def follow(self, says: Callable[[], Any]) -> None:
        self.says = says

    def tell(self) -> None:
        self.word, self.unsaid = json.dumps(self.says()), 0

    def samples(self) -> Any:
        """Epoch after epoch."""
        while True:
            self.sampler.set_epoch(self.sampler.epoch)
            yield from self.sampler
            yield None
            self.sampler.epoch += 1

    def take(self, count: int) -> None:
        for index in islice(self.stream, count):
            if index is not None:
                self.taken.append(index)
                self.unsaid += 1

    def finish(self, epochs: int) -> None:
        for epoch in range(self.sampler.epoch, epochs):
            self.sampler.set_epoch(epoch)
            self.taken += self.sampler


def changed(record: Record, living: list[Member]) -> None:
    """A record is made: the living say how far they are, of the dead it has the last word."""
    for each in record.order:
        if each in living:
            each.tell()
    record.words = [each.word for each in record.order]
    record.order, record.number = living, record.number + 1


def started(count: int, length: int, seed: int = 0, state: Any = None) -> Record:
    record = Record()
    record.order = [Member(record) for _ in range(count)]
    for each in record.order:
        each.begin(length, seed, state)
    return record


STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 5), st.integers(1, 30)),
    st.tuples(st.just("tell"), st.integers(0, 5), st.just(0)),
    st.tuples(st.sampled_from(["join", "leave", "die", "die before a word"]), st.integers(0, 5), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 3), st.lists(STEPS, max_size=40), st.data())
def test_whoever_comes_and_goes_each_sample_of_an_epoch_goes_to_one(
    length: int, count: int, first: int, steps: list[tuple[str, int, int]], data: st.DataObject
) -> None:
    """But for what a dead one has taken and not said, which is given out again."""
    record = started(count, length, seed=7)
    for each in record.order:
        each.sampler.set_epoch(first)
    gone, lost = list[Member](), list[int]()
    for what, which, number in steps:
        order = record.order
        member = order[which % len(order)]
        if what == "take":
            member.take(number)
        elif what == "tell":
            member.tell()
        elif what == "join":
            new = Member(record)
            changed(record, [*order[:which], new, *order[which:]])
            new.begin(length, 7)
            if not any(map(json.loads, record.words)):
                new.sampler.set_epoch(first)
        elif len(order) > 1:
            if what == "leave":
                member.tell()
            elif what == "die before a word":
                member.take(number)
            changed(record, [each for each in order if each is not member])
            lost += member.taken[len(member.taken) - member.unsaid :]
            gone.append(member)
    last = 1 + max([each.sampler.epoch for each in record.order + gone] + [first])
    for each in record.order:
        each.finish(last)
    got = Counter(index for each in record.order + gone for index in each.taken)
    got.subtract(lost)
    assert got == dict.fromkeys(range(length), last - first)


@given(st.integers(1, 60), st.integers(1, 7))
def test_shares_differ_by_one_and_nothing_is_padded(length: int, count: int) -> None:
    record = started(count, length)
    for epoch in range(3):
        numbers = []
        for each in record.order:
            each.sampler.set_epoch(epoch)
            numbers.append(len(each.sampler))
            own = [*each.sampler]
            assert len(own) == numbers[-1] == len(each.sampler)
            each.taken += own
        assert max(numbers) - min(numbers) <= 1
        assert Counter(i for each in record.order for i in each.taken) == dict.fromkeys(
            range(length), epoch + 1
        )


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_without_changes_it_is_a_distributed_sampler(count: int, shuffle: bool) -> None:
    record = Record()
    record.order = [Member(record) for _ in range(count)]
    for place, member in enumerate(record.order):
        mine = MemberSampler(range(24), member, shuffle, seed=3)
        torchs = DistributedSampler(range(24), count, place, shuffle, seed=3)
        for epoch in (2, 3, 4):
            mine.set_epoch(epoch)
            torchs.set_epoch(epoch)
            assert len(mine) == len(torchs)
            assert [*mine] == [*torchs]


def test_one_member_gets_a_permutation_and_each_epoch_and_seed_another() -> None:
    orders = []
    for seed in (0, 10):
        sampler = MemberSampler(range(50), seed=seed)
        orders += [[*sampler] for _ in range(3)]  # it goes on with the next epoch by itself
        assert sampler.epoch == 2
    assert all(sorted(order) == [*range(50)] for order in orders)
    assert len({*map(tuple, orders)}) == 6


def test_it_goes_on_in_the_new_share_at_the_next_index() -> None:
    record = started(2, 12)
    a, b = record.order
    plain = [*MemberSampler(range(12))]
    a.take(2)
    b.take(1)
    a.tell()
    changed(record, [b])
    b.take(9)
    assert a.taken + b.taken[:1] == [plain[0], plain[2], plain[1]]
    assert b.taken[1:] == plain[3:]


def test_a_newcomer_begins_where_the_others_are() -> None:
    record = started(1, 10)
    (a,) = record.order
    a.take(2 * 11 + 4)  # two epochs, and four samples
    new = Member(record)
    changed(record, [a, new])
    new.begin(10)
    assert new.sampler.epoch == 2
    assert [len(each.sampler) for each in record.order] == [4 + 3, 3]


def test_what_a_dead_one_leaves_of_an_epoch_that_is_over_comes_in_the_next() -> None:
    record = started(2, 10)
    a = record.order[0]
    a.finish(1)
    a.sampler.set_epoch(1)
    second = iter(a.sampler)
    own = [next(second) for _ in range(2)]
    changed(record, [a])
    first, after = [*MemberSampler(range(10))], MemberSampler(range(10))
    after.set_epoch(1)
    assert [*second] == first[1::2] + [i for i in after if i not in own]


def test_a_word_of_an_earlier_period_is_not_of_this_ones_share() -> None:
    record = started(2, 20)
    a, b = record.order
    b.take(3)
    new = Member(record)
    changed(record, [a, b, new])
    new.begin(20)
    b.take(2)
    changed(record, [a, new])  # b has said nothing since: its two are given out again
    a.finish(1)
    new.finish(1)
    got = Counter(a.taken + new.taken + b.taken[:3])
    assert got == dict.fromkeys(range(20), 1)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.sets(st.integers(0, 30)), st.integers(31, 40))
def test_what_is_left_is_as_lists_say(taken: list[int], holes: set[int], frontier: int) -> None:
    plain = [*sorted(holes), *range(frontier, 200)]
    gone = {each for place, n in enumerate(taken) for each in plain[place :: len(taken)][:n]}
    left = Left(frontier, sorted(holes)).after(taken)
    again = Left.of(json.loads(json.dumps(left.told())))
    for each in (left, again):
        assert [each[i] for i in range(60)] == [p for p in plain if p not in gone][:60]
        assert [each.before(p) for p in range(99)] == [len({*range(p)} & {*plain} - gone) for p in range(99)]


def test_what_a_dead_one_leaves_is_told_in_few_words() -> None:
    left = Left(0).after([1000, 0, 1000, 1000])
    assert left.told() == [4000, [1, 4, 1000]]


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4), st.integers(0, 20))
def test_a_state_is_resumed_on_another_number_of_members(
    length: int, saved_by: int, loaded_by: int, steps: int
) -> None:
    record = started(saved_by, length)
    steps = min(steps, length // saved_by)
    for each in record.order:
        each.take(steps)
    state = json.loads(json.dumps(record.order[-1].sampler.state_dict()))
    after = started(loaded_by, length, state=state)
    for each in after.order:
        each.finish(2)
    got = Counter(index for each in record.order + after.order for index in each.taken)
    assert got == dict.fromkeys(range(length), 2)


def test_a_state_of_other_data_is_refused() -> None:
    with pytest.raises(CheckpointError, match="of 10 samples, and this dataset has 11"):
        MemberSampler(range(11)).load_state_dict(MemberSampler(range(10)).state_dict())


@pytest.mark.parametrize(
    ("given", "says"), [({"dataset": []}, "dataset"), ({"seed": 1.0}, "seed"), ({"shuffle": 1}, "shuffle")]
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MemberSampler(**{"dataset": range(3)} | given)


def test_with_workers_what_they_have_asked_for_is_trained() -> None:
    """A change while batches are under way: those go to whom they were given to."""
    record = started(2, 64)
    a, b = record.order
    data = TensorDataset(torch.arange(64))
    loader = DataLoader(data, batch_size=4, sampler=a.sampler, num_workers=1, prefetch_factor=4)
    trained: list[int] = []
    batches = iter(loader)
    assert len(loader) == 8
    trained += next(batches)[0].tolist()
    assert a.sampler.progress()["taken"] == 20  # this batch, and four that the worker prepares
    b.take(10)
    b.tell()
    changed(record, [a])
    for (batch,) in batches:
        trained += batch.tolist()
    assert Counter(trained + b.taken) == dict.fromkeys(range(64), 1)
