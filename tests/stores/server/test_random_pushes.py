"""Pushes of random bytes, of the right length: a service takes them or refuses them, and lives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from scheduled_service import ENTER, World, offer
from table import TABLE

from tacit.compressors import Dense
from tacit.contracts import OneShot, PayloadSpec
from tacit.errors import TacitError
from tacit.stores.messages import Message, PayloadBuffer
from tacit.stores.protocol import FrameKind
from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.optimizers import ServerSGD
from tacit.stores.server.parameter_service import ParameterService
from tacit.stores.service import Sender
from tacit.topologies import Asynchronous, Star, Synchronous

N = 1500
BACK = PayloadSpec(None, N, torch.float32)
CODECS = sorted(
    {
        one_shot.codec
        for row in TABLE.values()
        if (one_shot := row.compressor.one_shot(0)) is not None and isinstance(one_shot.codec, OneShot)
    },
    key=repr,
)


def noise(codec: OneShot, rng: random.Random, span: tuple[tuple[int, int], ...] | None = None) -> Message:
    numel = N if span is None else sum(b - a for a, b in span)
    piece = PayloadSpec(codec, numel, torch.float32, spans=span)
    buffer = PayloadBuffer((piece,))
    raw = bytes(buffer.nbytes) if rng.random() < 0.1 else rng.randbytes(buffer.nbytes)
    if rng.random() < 0.1:
        raw = b"\xff" * buffer.nbytes
    buffer.buffer.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return Message(FrameKind.PUSH, 1, buffer.unpack(), (piece,), (BACK,), 0.1)


SERVICES = {
    "averages": AveragingService(2, "bucket"),
    "keeps": ParameterService(2, Star(Asynchronous()), BACK, None, "bucket"),
    "keeps rounds": ParameterService(2, Star(Synchronous(1)), BACK, None, "bucket"),
    "steps": ParameterService(2, Star(Asynchronous(), optimizer="server"), BACK, ServerSGD(0.9), "bucket"),
}


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_service_lives_through_noise(codec: OneShot, service: AveragingService | ParameterService) -> None:
    rng = random.Random(repr(codec))
    state: Any = service.start()
    senders = [Sender(i, 1) for i in range(2)]
    for sender in senders:
        _, state = service.on(sender, offer(torch.zeros(N)) if service.enters_workers else ENTER, state)
    for _ in range(30):
        for sender in senders:
            before, x = state, state.x.clone() if isinstance(service, ParameterService) else None
            message = replace(noise(codec, rng), sequence=state.records[sender.worker].clock + 1)
            replies, state = service.on(sender, message, state)
            refused = [reply.refused for reply in replies if reply.refused is not None]
            assert all(isinstance(each, TacitError) for each in refused)
            if refused and x is not None:
                assert state is before
                assert torch.equal(state.x.nan_to_num(), x.nan_to_num()), (
                    "a push that is refused changes nothing"
                )


def test_a_push_about_entries_that_are_not_there_is_refused() -> None:
    world = World(ParameterService(1, Star(Asynchronous()), BACK, None, "bucket"), 1, torch.zeros(N))
    world.enter(0)
    rng = random.Random(0)
    for span, numel in (((N - 1, N + 1),), None), (None, 2 * N):
        push = noise(Dense(), rng, span)
        if numel is not None:
            piece = PayloadSpec(Dense(), numel, torch.float32)
            push = Message(FrameKind.PUSH, 1, ((torch.zeros(numel),),), (piece,), (BACK,))
        (reply,), state = world.service.on(world.workers[0].sender, push, world.state)
        assert reply.refused is not None
        assert "entries, and the bucket has 1500" in str(reply.refused)
        assert state is world.state
