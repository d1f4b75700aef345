"""Pushes that end at a deadline: the largest entries have left, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from worker_threads import each, join

from tacit.compressors import ErrorFeedback, InParts, Sign, TopK
from tacit.contracts import Context, Payload, PayloadSpec, PushPull
from tacit.errors import ConfigError, PayloadError
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.messages import Message
from tacit.stores.protocol import Channel, FrameKind
from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.payloads import BufferWorkspace
from tacit.stores.server.process import ServerProcess
from tacit.stores.service import Sender
from tacit.topologies import Star

N, WORKERS = 1000, 3
CODEC = InParts(TopK(ratio=0.2))  # 200 entries in 16 parts of 13, the last of 5
FEEDBACK = ErrorFeedback(CODEC)
PIECE, BACK = PayloadSpec(CODEC, N, torch.float32), PayloadSpec(None, N, torch.float32)


def payload_of(x: Tensor) -> Payload:
    return tuple(part.clone() for part in CODEC.encode(x, Context(x, BufferWorkspace(), 1)))


def decoded(payload: Payload) -> Tensor:
    out = torch.zeros(N)
    CODEC.decode_(payload, out)
    return out


def gradient(worker: int, step: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * step + worker))


def cut_(payload: Payload, parts: int) -> None:
    CODEC.restore_(
        torch.cat([torch.empty(0, dtype=torch.uint8), *CODEC.message_parts(payload, N)[:parts]]), N, payload
    )


@pytest.mark.parametrize("parts", [0, 1, 7, 15, 16])
def test_a_prefix_has_the_largest_entries(parts: int) -> None:
    x = gradient(0, 0)
    payload = payload_of(x)
    cut_(payload, parts)
    largest = x.abs().topk(min(13 * parts, 200)).indices
    want = torch.zeros(N)
    want[largest] = x[largest]
    assert torch.equal(decoded(payload), want)
    assert len(CODEC.message_parts(payload, N)) == parts


def test_damaged_parts_and_what_has_no_exact_entries_are_refused() -> None:
    payload = payload_of(gradient(0, 0))
    first, second, *_ = CODEC.message_parts(payload, N)
    with pytest.raises(PayloadError, match="bytes, where up to 16 parts of"):
        CODEC.restore_(first[:-1], N, payload)
    with pytest.raises(PayloadError, match="26 positions of a peer are not different ones among 1000"):
        CODEC.restore_(torch.cat((second, second)), N, payload)
    with pytest.raises(ConfigError, match="sends no exact entries that could be sorted by magnitude"):
        InParts(TopK(values=Sign()))


def test_what_was_sent_and_what_is_kept_are_all() -> None:
    """The workers' and the server's residuals, after rounds in which each push ends somewhere."""
    star, service, chance = (
        Star(pull=FEEDBACK, deadline=1.0),
        AveragingService(WORKERS, "a"),
        random.Random(0),
    )
    state = service.start()
    for worker in range(WORKERS):
        _, state = service.on(Sender(worker, 1), Message(FrameKind.ENTER), state)
    kept: list[Any] = [FEEDBACK.init(torch.empty(N)) for _ in range(WORKERS)]
    given, told = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    lengths = set()
    for step in range(6):
        talks, longest = [], 0
        for worker in range(WORKERS):
            x = gradient(worker, step)
            given += x.double() / WORKERS
            ctx = Context(out=x, work=BufferWorkspace(), peers=WORKERS, rank=worker)
            talk = star.conduct(x, FEEDBACK, kept[worker], ctx)
            request = next(talk)
            assert isinstance(request, PushPull)
            assert request.seconds == 1.0
            parts = chance.randint(0, 16)
            longest = max(longest, parts)
            cut_(request.payloads[0], parts)  # as the transport does
            message = Message(FrameKind.PUSH, step + 1, request.payloads, request.pieces, request.pulls)
            replies, state = service.on(Sender(worker, 1), message, state)
            talks.append((talk, x))
        answers = []
        for worker, (talk, x) in enumerate(talks):
            with pytest.raises(StopIteration) as end:
                talk.send(replies[worker].payloads)
            kept[worker] = {name: value.clone() for name, value in end.value.value.state.items()}
            answers.append(x)
        assert all(torch.equal(x, answers[0]) for x in answers)
        lengths.add(int(answers[0].count_nonzero()))
        assert int(answers[0].count_nonzero()) <= 13 * longest
        told += answers[0].double()
    assert len(lengths) > 1, "answers differ in length"
    owed = sum((each["residual"].double() for each in kept), torch.zeros(N, dtype=torch.float64)) / WORKERS
    owed += state.new_residual[0][0].double()
    torch.testing.assert_close(told + owed, given, atol=1e-5, rtol=0)


@pytest.mark.parametrize("parts", [1, 5, 16])
def test_the_server_has_what_has_left(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    host = serve(2)
    servers = each(lambda: join(host, 0), lambda: join(host, 1))
    left = {id(server._channel): parts for server in servers}  # type: ignore[attr-defined]

    def drained(channel: Channel, seconds: float) -> bool:
        left[id(channel)] = left.get(id(channel), 1) - 1
        return left[id(channel)] > 0

    def push(worker: int, server: ServerClient) -> tuple[Payload, Tensor]:
        payload = payload_of(gradient(worker, 0))
        asked = server.post(PushPull((payload,), (PIECE,), (BACK,), seconds=5.0), "a/0")
        assert asked.done.wait(30)
        ((answer,),) = asked.answer()
        return payload, answer.clone()

    monkeypatch.setattr(Channel, "drain", drained)
    (mine, answer), (theirs, other) = each(*[lambda i=i, s=s: push(i, s) for i, s in enumerate(servers)])  # type: ignore[misc]
    assert torch.equal(answer, other)
    assert int(decoded(mine).count_nonzero()) == min(13 * parts, 200)
    torch.testing.assert_close(answer, (decoded(mine) + decoded(theirs)) / 2)
