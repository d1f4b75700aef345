"""Which gradients travel together, and in which order."""

import itertools
import random

import pytest

from cases import for_each
from tacit.gradients.layerwise.message_plan import (
    Gradient,
    Link,
    LinkUse,
    MessagePlan,
    by_priority,
    by_size,
    fitted,
    merged,
)

LINK = Link(latency=1.0, rate=10.0)


def gradients(*sizes: float, ready: float = 0.0, buckets: int = 1) -> list[Gradient]:
    """In backward's order: the last layer first, which the next forward pass needs last."""
    last = len(sizes) - 1
    return [
        Gradient(f"p{i}", size, i * ready, last - i, i * buckets // len(sizes), int(size) * 1024)
        for i, size in enumerate(sizes)
    ]


def ends(plan: MessagePlan, given: list[Gradient], link: Link) -> float:
    """When the last message is through, each leaving when all of it is ready and the link is free."""
    by_name = {each.name: each for each in given}
    free = 0.0
    for message in plan.messages:
        parts = [by_name[name] for name in message]
        free = max(free, max(each.ready for each in parts)) + link.seconds(sum(each.nbytes for each in parts))
    return free


def test_gradients_are_joined_while_the_link_is_busy() -> None:
    # p0 takes 2 s; p1 and p2 are ready before that, so the link takes them together.
    assert merged(gradients(10, 10, 10, ready=0.5), LINK).messages == (("p0", "p1", "p2"),)
    assert merged(gradients(10, 10, 10, ready=5.0), LINK).messages == (("p0",), ("p1",), ("p2",))


def test_a_message_keeps_to_one_of_ddps_buckets() -> None:
    assert merged(gradients(1, 1, 1, 1, buckets=2), LINK).messages == (("p0", "p1"), ("p2", "p3"))


@for_each("seed", range(20))
def test_no_other_way_to_join_neighbours_ends_earlier(seed: int) -> None:
    draw = random.Random(seed)
    given = [Gradient(f"p{i}", draw.uniform(1, 30), 0.0) for i in range(7)]
    ready = list(itertools.accumulate(draw.uniform(0, 3) for _ in given))
    given = [Gradient(each.name, each.nbytes, at) for each, at in zip(given, ready, strict=True)]
    best = min(
        ends(_cut_at(given, cuts), given, LINK)
        for count in range(len(given))
        for cuts in itertools.combinations(range(1, len(given)), count)
    )
    assert ends(merged(given, LINK), given, LINK) == pytest.approx(best)


def _cut_at(given: list[Gradient], cuts: tuple[int, ...]) -> MessagePlan:
    edges = [0, *cuts, len(given)]
    return MessagePlan(tuple(tuple(g.name for g in given[a:b]) for a, b in itertools.pairwise(edges)))


def test_what_is_needed_first_leaves_first_of_what_is_ready() -> None:
    given = gradients(10, 10, 10, 10, ready=0.5)
    # p0 is alone at first; when it is through, after 2 s, the others are ready.
    assert by_priority(given, LINK, most=10).messages == (("p0",), ("p3",), ("p2",), ("p1",))


def test_a_credit_lets_more_leave_before_the_first_is_through() -> None:
    given = gradients(10, 10, 10, 10, ready=0.5)
    assert by_priority(given, LINK, most=10, credit=30).messages == (("p0",), ("p1",), ("p2",), ("p3",))


def test_a_large_gradient_is_cut_into_slices_that_cover_it_once() -> None:
    given = [Gradient("big", 100.0, 0.0, 1, 0, 100_352), Gradient("small", 25.0, 0.0, 0, 0, 100)]
    plan = by_priority(given, LINK, most=30)
    assert plan.messages[0] == ("small",)
    sizes = [[int(end) for end in each[4:-1].split(":")] for message in plan.messages[1:] for each in message]
    assert sizes == [[0, 25600], [25600, 51200], [51200, 76800], [76800, 100_352]]


def test_what_may_not_be_cut_stays_whole() -> None:
    plan = by_priority([Gradient("big", 100.0, 0.0)], LINK, most=30)
    assert plan.messages == (("big",),)


def test_by_size_neighbours_are_joined_and_nothing_is_cut() -> None:
    assert by_size(gradients(3, 3, 3, 20, 3), most=6).messages == (
        ("p0", "p1"),
        ("p2",),
        ("p3",),
        ("p4",),
    )


@for_each("seed", range(50))
def test_each_gradient_leaves_once(seed: int) -> None:
    draw = random.Random(seed)
    given = gradients(
        *(draw.uniform(1, 100) for _ in range(12)), ready=draw.random(), buckets=draw.randint(1, 4)
    )
    for plan in (
        merged(given, LINK),
        by_priority(given, LINK, credit=draw.choice([0.0, 50.0])),
        by_size(given, 40),
    ):
        assert sorted(itertools.chain(*plan.messages)) == sorted(each.name for each in given)


def test_the_first_of_a_message_decides_how_urgent_it_is() -> None:
    given = [Gradient("a", 1.0, 0.0, 5), Gradient("b", 1.0, 0.0, 0), Gradient("c", 9.0, 0.0, 3)]
    assert by_priority(given, LINK, most=2).messages == (("a", "b"), ("c",))


@pytest.mark.parametrize("most", [None, 1.0])
def test_no_gradients_make_no_messages(most: float | None) -> None:
    assert by_priority([], LINK, most).messages == ()


def test_what_a_message_costs_is_told_by_rounds_of_few_and_of_many() -> None:
    busy = Link(latency=0.01, rate=50.0)
    few, many = (LinkUse(n * busy.latency + 100 / busy.rate, 100.0, n) for n in (3, 40))
    found = fitted(few, many, idle=Link(0.001, 80.0))
    assert found.latency == pytest.approx(busy.latency)
    assert found.rate == pytest.approx(busy.rate)


def test_messages_never_cost_less_than_on_idle_links() -> None:
    idle = Link(0.001, 80.0)
    assert fitted(LinkUse(0.5, 100.0, 3), LinkUse(0.4, 100.0, 40), idle) == idle
    assert fitted(LinkUse(0.0, 0.0, 0), LinkUse(0.4, 100.0, 40), idle) == idle
    assert fitted(LinkUse(4.0, 100.0, 3), LinkUse(4.0, 100.0, 3), idle).latency == idle.latency
