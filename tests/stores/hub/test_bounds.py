"""What a hub refuses of what members push, and whom it tells."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import Tensor

from tacit.contracts import AllGather, AllReduce, AllToAll, Collective, Payload, ReduceScatter
from tacit.errors import PayloadError
from tacit.stores.hub.bounds import IDLE, Bounds, Norms, norms
from tacit.stores.hub.collectives import ShareSpec
from tacit.transports.relayed_group import Done, RelayedGroup

SIZE = 3
LARGE = "times as large as the others' in the median, where --clip allows 10"
BEYOND = "its share holds NaN, infinity or numbers beyond 1e30"


class Heard:
    """A hub's end of a connection, which keeps what it is told."""

    hubs = 1

    def share(self, group: str, about: dict[str, object], body: list[Tensor], done: Done, hub: int) -> None:
        self.spec = ShareSpec(group=group, by=f"m{about['rank']}", **about)  # type: ignore[arg-type]
        self.body = torch.cat([*body])

    def quit(self, group: str) -> None:
        """Nothing to tell."""


def told(rank: int, request: Collective, stage: int, group: str) -> tuple[ShareSpec, Tensor]:
    """What a rank tells of a request, and sends."""
    heard = Heard()
    made = RelayedGroup(heard, group, rank, SIZE)  # type: ignore[arg-type]
    made.says(request, "b", stage, {})
    match request:
        case AllReduce((x,)):
            made.allreduce([x])
        case AllGather(payload):
            made.all_gather_single(torch.empty(0), flat(payload))
        case AllToAll(payloads):
            sizes = [flat(each).numel() for each in payloads]
            made.all_to_all_single(torch.empty(0), torch.cat([*map(flat, payloads)]), [], sizes)
        case ReduceScatter(x, spans):
            made.all_to_all_single(torch.empty(0), x, [], [b - a for a, b in spans])
    return heard.spec, heard.body


def flat(payload: Payload) -> Tensor:
    """As the transport writes it: wide types first."""
    parts = sorted(payload, key=lambda each: each.itemsize, reverse=True)
    return torch.cat([each.reshape(-1).view(torch.uint8) for each in parts])


def refused(
    bounds: Bounds, requests: list[Collective], stage: int = 0, group: str = "period/1/0 0 1 2 #1"
) -> dict[int, str]:
    given = [told(rank, request, stage, group) for rank, request in enumerate(requests)]
    return bounds.refused(
        {rank: spec for rank, (spec, _) in enumerate(given)},
        {rank: body.numel() for rank, (_, body) in enumerate(given)},
        {rank: norms(*each) for rank, each in enumerate(given)},
    )


def codes(unit: float, blocks: int = 2) -> Payload:
    """As `lowbit` sends: packed levels, of any value, and the units of blocks."""
    return torch.randint(0, 256, (5,), dtype=torch.uint8), torch.full((blocks,), unit, dtype=torch.bfloat16)


def made(kind: str, size: float) -> Collective:
    if kind == "reduce":
        return AllReduce((torch.tensor([0.1, -0.2, 0.0]) * size,))
    if kind == "scatter":
        return ReduceScatter(torch.tensor([0.1, -0.2, 0.3, 0.1]) * size, ((0, 2), (2, 3), (3, 4)))
    if kind == "gather":
        return AllGather(codes(size))
    return AllToAll((codes(size), codes(size / 2, 3), codes(size / 4, 1)))


@pytest.mark.parametrize("kind", ["reduce", "scatter", "gather", "exchange"])
def test_what_is_far_larger_than_the_others_is_refused(kind: str) -> None:
    shares = [made(kind, size) for size in (1.0, 1000.0, 1.5)]
    (why,) = (found := refused(Bounds(10.0), shares)).values()
    assert [*found] == [1]
    assert LARGE in why
    assert not refused(Bounds(None), shares), "sizes alone are judged where nothing was asked for"
    assert not refused(Bounds(10.0), [made(kind, size) for size in (1.0, 9.0, 0.0)])


@pytest.mark.parametrize("kind", ["reduce", "scatter", "gather", "exchange"])
@pytest.mark.parametrize("size", [math.nan, math.inf, 1e35])
def test_what_is_not_finite_is_refused(kind: str, size: float) -> None:
    assert refused(Bounds(10.0), [made(kind, each) for each in (1.0, 1.0, size)]) == {2: BEYOND}


def test_with_two_the_larger_one_is_refused_and_nothing_where_one_has_nothing() -> None:
    found = Bounds(10.0).refused
    spec = ShareSpec("g #1", "0", 0, 2, "reduce", bucket="b")
    for ours, theirs, who in ((1.0, 11.0, [1]), (11.0, 1.0, [0]), (5.0, 0.0, []), (0.0, 0.0, [])):
        assert [*found({0: spec, 1: spec}, {0: 4, 1: 4}, {0: Norms((ours,)), 1: Norms((theirs,))})] == who


def test_a_mean_that_one_has_made_for_all_is_held_to_what_it_was_sent() -> None:
    bounds = Bounds(10.0)
    for wrong in (False, True):
        assert not refused(bounds, [made("exchange", 1.0)] * 3)
        # Parts are of very different sizes by right: each is compared with what came for it.
        means = [AllGather(codes(size)) for size in (1.0, 0.5, 300.0 if wrong else 0.25)]
        found = refused(bounds, [*means], stage=1, group="period/1/0 0 1 2 #2")
        assert [*found] == ([2] if wrong else [])
    assert not refused(bounds, [AllGather(codes(size)) for size in (1.0, 1.0, 300.0)], stage=1)


def test_what_was_sent_is_forgotten_with_its_period() -> None:
    bounds = Bounds(10.0)
    refused(bounds, [made("exchange", 1.0)] * 3)
    bounds.forget("period/1/0 0 1 2 #2")
    assert not refused(bounds, [AllGather(codes(size)) for size in (1.0, 1.0, 300.0)], stage=1)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_a_share_of_another_size_is_refused(clip: float | None) -> None:
    shares: list[Collective] = [AllReduce((torch.ones(n),)) for n in (4, 4, 5)]
    assert refused(Bounds(clip), shares) == {
        2: "its share has 20 bytes, and the others' 16: does it train the same model?"
    }
    shares = [AllReduce((torch.ones(n),)) for n in (4, 5, 6)]
    assert [*refused(Bounds(clip), shares)] == [1, 2], "who was there first is right"
    spec = ShareSpec("g #1", "0", 0, 3, "exchange", sizes=[1, 1, 1], bucket="b")
    assert [*Bounds(clip).refused(dict.fromkeys(range(3), spec), {0: 4, 1: 4, 2: 4}, {})] == [0, 1, 2]


def test_who_says_another_thing_of_a_share_is_refused() -> None:
    usual, other = ShareSpec("g #1", "0", 0, 3, "gather", bucket="b"), ShareSpec("g #1", "0", 0, 3, "gather")
    found = Bounds(10.0).refused({0: other, 1: usual, 2: usual}, dict.fromkeys(range(3), 8), {})
    assert found == {0: "its share is made of other parts than the others': does it train the same model?"}


def test_ranks_may_send_unequal_parts_where_a_topology_has_them() -> None:
    shares = [
        AllToAll(tuple((torch.ones(rank + to + 1),) for to in range(3)), arriving=((torch.ones(1),),) * 3)
        for rank in range(3)
    ]
    assert not refused(Bounds(10.0), [*shares])
    assert [*refused(Bounds(10.0), [*shares[:2], AllToAll(((torch.ones(1),),) * 3)])] == [2]


def test_zeros_for_ever_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tacit")
    bounds = Bounds(10.0)
    for _ in range(IDLE):
        assert not refused(bounds, [made("gather", size) for size in (1.0, 0.0, 1.0)])
        refused(bounds, [made("gather", 0.0)] * 3)  # what nobody trains is nobody's fault
    assert caplog.messages == [f"m1 has pushed nothing but zeros {IDLE} times in a row"]


def test_what_a_share_says_of_itself_is_checked() -> None:
    for parts, wrong in (([[("text", 1)]], "an unknown type"), ([[], []], "of 2 ranks")):
        with pytest.raises(PayloadError, match=wrong):
            ShareSpec("g", "0", 0, 3, "gather", parts=parts)
    short = ShareSpec("g", "0", 0, 1, "gather", parts=[[("float32", 400), ("float32", 8)]])
    assert norms(short, torch.ones(2).view(torch.uint8)).by_part == (pytest.approx(2**0.5), 0.0)
