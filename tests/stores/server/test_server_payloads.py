"""Payloads whose length follows from their values: a body holds the length of each, and is checked."""

import pytest
import torch
from torch import Tensor

from cases import for_each
from tacit.compressors import Blockwise, EntropyCoded
from tacit.contracts import Context, Payload, PayloadSpec
from tacit.errors import PayloadError
from tacit.stores.messages import PayloadBuffer
from tacit.stores.server.payloads import BufferWorkspace

N, BESIDE = 5000, 40
PIECES = (
    PayloadSpec(EntropyCoded(3), N, torch.float32),
    PayloadSpec(Blockwise(8), BESIDE, torch.float32),
    PayloadSpec(None, 3, torch.float32),
)


def payloads(seed: int = 0) -> tuple[Payload, ...]:
    generator, work = torch.Generator().manual_seed(seed), BufferWorkspace()
    found: list[Payload] = []
    for i, piece in enumerate(PIECES):
        x = torch.randn(piece.numel, generator=generator)
        ctx = Context(out=x, work=work, peers=1).inside(str(i))
        found.append((x,) if piece.codec is None else piece.codec.encode(x, ctx))
    return tuple(found)


def body_of(given: tuple[Payload, ...]) -> Tensor:
    return torch.cat(PayloadBuffer(PIECES).pack(given))


def read(body: Tensor) -> tuple[Payload, ...]:
    buffer = PayloadBuffer(PIECES)
    buffer.room(len(body)).copy_(body)
    buffer.arrived()
    return buffer.unpack()


def test_what_is_packed_is_read_and_shorter() -> None:
    given = payloads()
    body, fixed = body_of(given), PayloadBuffer(PIECES)
    assert fixed.least <= len(body) <= fixed.most
    assert len(body) < 0.8 * fixed.nbytes
    for ours, theirs in zip(read(body), given, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_bodies_of_fixed_length_are_as_they_were() -> None:
    buffer = PayloadBuffer(PIECES[1:])
    assert buffer.least == buffer.most == buffer.nbytes
    assert buffer.room(buffer.nbytes) is buffer.buffer


@for_each("cut", [1, 4, 100])
def test_a_body_that_is_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(PayloadError):
        read(body_of(payloads())[:-cut])


@for_each(("at", "value"), [(0, 255), (3, 255), (4 + 20 + 2, 255), (4 + 20 + 20, 7)])
def test_a_damaged_body_is_refused(at: int, value: int) -> None:
    body = body_of(payloads())
    body[at] ^= value
    with pytest.raises(PayloadError):
        read(body)


def test_a_body_that_is_too_long_is_refused() -> None:
    body = body_of(payloads())
    with pytest.raises(PayloadError, match="belong to its payloads"):
        read(torch.cat((body, body[:5])))
