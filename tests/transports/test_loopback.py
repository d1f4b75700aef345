import pytest
import torch

from tacit.contracts import AllGather, AllReduce, AllToAll, Permute, Request, flags
from tacit.exchange.joined_requests import conducted, fuse
from tacit.transports.loopback import Loopback
from tacit.transports.message_layout import nbytes, pack_, unpack


def talk(*requests: Request):
    answers = []
    for request in requests:
        answers.append((yield request))  # noqa: PERF401
    return answers


def mean(*values: float) -> AllReduce:
    return AllReduce(tuple(torch.tensor([v]) for v in values), "world")


def test_mean_and_gather() -> None:
    (a, b), (c, d) = Loopback(2).run(
        [talk(mean(r), AllGather((torch.tensor([r]),), "world")) for r in (0.0, 2.0)]
    )
    assert a[0].item() == c[0].item() == 1.0
    assert [p[0].item() for p in b] == [p[0].item() for p in d] == [0.0, 2.0]


def test_axes_are_answered_apart() -> None:
    net = Loopback(4, {"node": [[0, 1], [2, 3]]})
    got = net.run([talk(AllReduce((torch.tensor([float(r)]),), "node")) for r in range(4)])
    assert [answers[0][0].item() for answers in got] == [0.5, 0.5, 2.5, 2.5]


def test_a_mean_of_two_types_cannot_be_asked_for() -> None:
    """A transport adds up one message in one type, and would take the bits of the others for it."""
    for other in (torch.float64, torch.bfloat16, torch.int32):
        with pytest.raises(AssertionError, match="write one AllReduce for each type"):
            Loopback(1).run([talk(AllReduce((torch.ones(1), torch.ones(1, dtype=other)), "world"))])


def test_a_deadlock_says_who_waits_for_whom() -> None:
    with pytest.raises(
        RuntimeError, match="rank 0 wants AllReduce on 'world' and waits for rank 1, which wants AllGather"
    ):
        Loopback(2).run([talk(mean(1)), talk(AllGather((torch.ones(1),), "world"))])


def test_a_rank_that_has_ended_is_named() -> None:
    with pytest.raises(RuntimeError, match="waits for rank 1, which has ended"):
        Loopback(2).run([talk(mean(1)), talk()])


def watched(exchange, see):
    """The same exchange; `see` gets each request."""
    answer = None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            return end.value
        see(request)
        answer = yield request


def test_like_wishes_travel_together() -> None:
    seen: list[Request] = []

    def ranks(r: float):
        return [
            conducted(talk(AllReduce((torch.full((2,), r),)), AllReduce((torch.full((3,), r),))), "world"),
            conducted(talk(AllReduce((torch.full((1,), 10 * r),))), "world"),
        ]

    first, second = Loopback(2).run([watched(fuse(ranks(1.0)), seen.append), fuse(ranks(3.0))])
    assert [len(w.payload) for w in seen if isinstance(w, AllReduce)] == [2, 1]
    for talks in (first, second):
        assert talks[0][0][0].tolist() == [2.0, 2.0]
        assert talks[1][0][0].tolist() == [20.0]


def test_a_small_mean_rides_in_a_gather_and_a_large_one_does_not() -> None:
    for numel, messages in ((4, 1), (100_000, 2)):
        seen: list[Request] = []

        def both(r: float, n: int = numel):
            return fuse(
                [
                    conducted(talk(AllGather((torch.tensor([r]),))), "world"),
                    conducted(talk(AllReduce((torch.full((n,), r),))), "world"),
                ]
            )

        got = Loopback(2).run([watched(both(1.0), seen.append), both(2.0)])
        assert len(seen) == messages
        for gathered, averaged in got:
            assert [p[0].item() for p in gathered[0]] == [1.0, 2.0]
            assert bool((averaged[0][0] == 1.5).all())


@pytest.mark.parametrize("first", ["gather", "all-to-all", "mean"])
@pytest.mark.parametrize("each", [1, 2])
def test_a_rank_sends_its_own_flags_in_a_gather_and_their_mean_is_that_of_all(first: str, each: int) -> None:
    """Two spans of `each` numbers a rank, which are its own, and between them three that all have."""
    peers, sizes, got = 3, [], {}
    width = each * peers

    def told(rank: int) -> torch.Tensor:
        numbers = torch.zeros(2 * width + 3)
        numbers[each * rank] = numbers[width + 3 + each * rank] = 7.0 + rank
        numbers[width : width + 3] = torch.tensor([rank, 1.0, 0.0])
        return numbers

    def note(request) -> None:
        sent = request.payloads[0] if isinstance(request, AllToAll) else request.payload
        sizes.append(sum(part.numel() for part in sent))

    asked = {
        "gather": lambda r: AllGather((torch.tensor([r]),)),
        "all-to-all": lambda r: AllToAll(((torch.tensor([r]),),) * peers),
        "mean": lambda r: AllReduce((torch.tensor([float(r)]),)),
    }
    for owned in (((0, width), (width + 3, 2 * width + 3)), ()):
        found = [flags(told(r), owned, r, peers) for r in range(peers)]
        talks = [conducted(talk(asked[first](r)), "world", flags=found[r]) for r in range(peers)]
        Loopback(peers).run([watched(talks[0], note), *talks[1:]])
        got[bool(owned)] = [each.numbers for each in found]
    for own, whole in zip(got[True], got[False], strict=True):
        assert torch.equal(own, whole)
        assert torch.equal(own, sum(told(r) / peers for r in range(peers)))
    all_of_them = 1 + 2 * width + 3
    assert sizes == [all_of_them if first == "mean" else 1 + 2 * each + 3, all_of_them]


@pytest.mark.parametrize(("numel", "messages"), [(4, 1), (100_000, 2)])
def test_a_small_gather_rides_in_an_all_to_all_and_a_large_one_does_not(numel: int, messages: int) -> None:
    seen: list[Request] = []

    def noted(exchange):
        answer = None
        while True:
            try:
                seen.append(exchange.send(answer))
            except StopIteration as end:
                return end.value
            answer = yield seen[-1]

    def every(r: float):
        parts = tuple((torch.tensor([10 * r + to]),) for to in range(2))
        asked = AllToAll(parts), AllGather((torch.full((numel,), r),)), mean(r)
        return fuse([conducted(talk(each), "world") for each in asked])

    got = Loopback(2).run([noted(every(1.0)), every(2.0)])
    assert len(seen) == messages
    for rank, ((arrived,), (gathered,), (averaged,)) in enumerate(got):
        assert [part[0].item() for part in arrived] == [10.0 + rank, 20.0 + rank]
        assert [payload[0].unique().tolist() for payload in gathered] == [[1.0], [2.0]]
        assert averaged[0].item() == 1.5


def test_a_message_has_no_padding_and_comes_back_whole() -> None:
    payload = (
        torch.arange(3, dtype=torch.uint8),
        torch.tensor([1.5, -2.0]),
        torch.arange(5, dtype=torch.int16),
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int64),
    )
    assert nbytes(payload) == 3 + 8 + 10 + 32
    buffer = torch.zeros(3 + nbytes(payload), dtype=torch.uint8)
    message = buffer[3:]  # as a peer's message lies in the answer of an all-gather: anywhere
    pack_(payload, message)
    for tensor, back in zip(payload, unpack(message, payload), strict=True):
        assert tensor.dtype == back.dtype
        assert torch.equal(tensor, back)


def test_a_payload_reaches_the_one_it_is_for() -> None:
    # A chain, and one who has no part in it.
    to = (1, 2, None, None)
    got = Loopback(4).run([talk(Permute((torch.tensor([float(r)]),), to, "world")) for r in range(4)])
    assert [None if theirs is None else theirs[0].item() for (theirs,) in got] == [None, 0.0, 1.0, None]


def test_peers_swap_and_what_is_swapped_alike_travels_together() -> None:
    seen = []

    def two(rank: float):
        requests = [Permute((torch.full((n,), rank),), (1, 0, None), "world") for n in (2, 3)]
        talks = fuse([talk(requests[0]), talk(requests[1])])
        return watched(talks, lambda request: seen.append(len(request.payload)))

    net = Loopback(3)
    one, other, idle = net.run([two(r) for r in (0.0, 1.0, 2.0)])
    assert seen == [2, 2, 2]
    assert [answers[0][0].tolist() for answers in one] == [[1.0, 1.0], [1.0, 1.0, 1.0]]
    assert [answers[0][0].tolist() for answers in other] == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    assert idle == [[None], [None]]
    assert net.sent == [20, 20, 0]


def test_sends_to_others_stay_apart() -> None:
    def rank(r: float):
        ends = ((1, None, None), (2, None, None))
        return fuse([talk(Permute((torch.full((2,), r),), to, "world")) for to in ends])

    got = Loopback(3).run([rank(float(r)) for r in range(3)])
    assert [[None if a is None else a[0].tolist() for (a,) in answers] for answers in got] == [
        [None, None],
        [[0.0, 0.0], None],
        [None, [0.0, 0.0]],
    ]


@pytest.mark.parametrize("to", [(1, 1, None), (2, None), (0, None), (-1, None)])
def test_who_sends_to_whom_must_be_possible(to: tuple[int | None, ...]) -> None:
    with pytest.raises(AssertionError):
        Permute((torch.ones(1),), to)
