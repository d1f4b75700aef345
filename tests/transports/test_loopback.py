import pytest
import torch

from tacit.contracts import Gather, Mean, Request
from tacit.exchanges import fuse, on
from tacit.transports.loopback import Loopback
from tacit.transports.wire import nbytes, pack_, unpack


def talk(*wishes: Request):
    answers = []
    for wish in wishes:
        answers.append((yield wish))  # noqa: PERF401
    return answers


def mean(*values: float) -> Mean:
    return Mean(tuple(torch.tensor([v]) for v in values), "world")


def test_mean_and_gather() -> None:
    (a, b), (c, d) = Loopback(2).run(
        [talk(mean(r), Gather((torch.tensor([r]),), "world")) for r in (0.0, 2.0)]
    )
    assert a[0].item() == c[0].item() == 1.0
    assert [p[0].item() for p in b] == [p[0].item() for p in d] == [0.0, 2.0]


def test_axes_are_answered_apart() -> None:
    net = Loopback(4, {"node": [[0, 1], [2, 3]]})
    got = net.run([talk(Mean((torch.tensor([float(r)]),), "node")) for r in range(4)])
    assert [answers[0][0].item() for answers in got] == [0.5, 0.5, 2.5, 2.5]


def test_a_deadlock_says_who_waits_for_whom() -> None:
    with pytest.raises(
        RuntimeError, match="rank 0 wants Mean on 'world' and waits for rank 1, which wants Gather"
    ):
        Loopback(2).run([talk(mean(1)), talk(Gather((torch.ones(1),), "world"))])


def test_a_rank_that_has_ended_is_named() -> None:
    with pytest.raises(RuntimeError, match="waits for rank 1, which has ended"):
        Loopback(2).run([talk(mean(1)), talk()])


def test_like_wishes_travel_together() -> None:
    seen: list[Request] = []

    def spy(exchange):
        answer = None
        while True:
            try:
                request = exchange.send(answer)
            except StopIteration as end:
                return end.value
            seen.append(request)
            answer = yield request

    def ranks(r: float):
        return [
            on("world", talk(Mean((torch.full((2,), r),)), Mean((torch.full((3,), r),)))),
            on("world", talk(Mean((torch.full((1,), 10 * r),)))),
        ]

    first, second = Loopback(2).run([spy(fuse(ranks(1.0))), fuse(ranks(3.0))])
    assert [len(w.payload) for w in seen if isinstance(w, Mean)] == [2, 1]
    for talks in (first, second):
        assert talks[0][0][0].tolist() == [2.0, 2.0]
        assert talks[1][0][0].tolist() == [20.0]


def test_a_small_mean_rides_in_a_gather_and_a_large_one_does_not() -> None:
    for numel, messages in ((4, 1), (100_000, 2)):
        seen = 0

        def count(exchange):
            nonlocal seen
            answer = None
            while True:
                try:
                    request = exchange.send(answer)
                except StopIteration as end:
                    return end.value
                seen += 1
                answer = yield request

        def both(r: float, n: int = numel):
            return fuse(
                [
                    on("world", talk(Gather((torch.tensor([r]),)))),
                    on("world", talk(Mean((torch.full((n,), r),)))),
                ]
            )

        got = Loopback(2).run([count(both(1.0)), both(2.0)])
        assert seen == messages
        for gathered, averaged in got:
            assert [p[0].item() for p in gathered[0]] == [1.0, 2.0]
            assert bool((averaged[0][0] == 1.5).all())


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
