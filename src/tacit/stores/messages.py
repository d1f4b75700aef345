"""The messages between workers and a parameter server: texts about themselves, and messages to services."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tacit.contracts import Payload, PayloadSpec, ServerTopology
from tacit.errors import PayloadError
from tacit.stores.protocol import FrameKind, Header
from tacit.transports.message_layout import nbytes, unpack
from tacit.transports.meter import like

# ---- texts --------------------------------------------------------------------------------------------

OptimizerSpec: TypeAlias = Mapping[str, str | bool | float | tuple[float, ...]]
"""An optimizer in plain values: its "kind", and the hyper-parameters that are not the learning rate."""

ParameterSpec: TypeAlias = tuple[str, tuple[int, ...], str, int | None]
"""Name, shape, type, and the index of the optimizer that steps it; None where workers move it."""


@dataclass(frozen=True)
class RunSpec:
    """What all workers of a server have in common.

    Attributes:
        star: how the server is to serve.
        optimizers: one for each of the optimizer's groups, where the server steps.
        model: the parameters that this server holds.
    """

    star: ServerTopology
    optimizers: tuple[OptimizerSpec, ...]
    model: tuple[ParameterSpec, ...]


@dataclass(frozen=True)
class Hello:
    """A worker's first message.

    Attributes:
        worker: its number; `workers`: how many it thinks there are.
        server: which server it takes this one for.
        process: equal for sessions of one process, and for no others.
        timeout: seconds after which a peer that does not answer is lost.
        run: what it has in common with the other workers.
    """

    worker: int
    workers: int
    server: int
    process: str
    timeout: float
    run: RunSpec


@dataclass(frozen=True)
class Welcome:
    """The server's answer to a `Hello`.

    Attributes:
        clocks: for each bucket that the server knows, how many pushes of the worker it has taken.
    """

    clocks: Mapping[str, int]


@dataclass(frozen=True)
class MessageSpec:
    """How messages of one number are read, and the replies to them; a worker declares it before the first.

    Attributes:
        key: the key of their bucket.
        pieces: the format of each payload of the message.
        pulls: the format of each payload of the reply.
        back: if the worker enters with it, the format in which it gets the parameters.
    """

    key: str
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    back: PayloadSpec | None = None


ServerStats: TypeAlias = Mapping[str, int | float | Mapping[int, int] | None]
"""What a server has counted."""


# ---- messages to a service ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """A worker's message to the service of a bucket; equal at both ends.

    Attributes:
        kind: ENTER: the worker begins, or comes back. OFFER: the same, with the parameters that it begins
            with, for which it was asked. PUSH: it pushes, and waits for the answer. MEET, or PULL: it has
            nothing more to push for now, and waits until no other worker has either.
        sequence: counts the worker's pushes to this bucket from 1, over all of its lives; in other messages
            any number, which the reply repeats.
        payloads: the pushed payloads, in the formats of `pieces`; of an OFFER, the parameters as one tensor.
        pulls: the formats of the reply.
        lr: the worker's learning rate, for a server that steps.
    """

    kind: FrameKind
    sequence: int = 0
    payloads: tuple[Payload, ...] = ()
    pieces: tuple[PayloadSpec, ...] = ()
    pulls: tuple[PayloadSpec, ...] = ()
    lr: float = 0.0


_NOTHING = torch.empty(0, dtype=torch.uint8)
_LENGTH = 4
"""Bytes of the length of a message."""


def _extent(piece: PayloadSpec, payload: Payload) -> tuple[int, int]:
    """The least and the most bytes of a payload in a body."""
    if piece.codec is not None and piece.codec.varies:
        return _LENGTH, _LENGTH + piece.codec.longest(payload, piece.numel)
    return nbytes(payload), nbytes(payload)


def _cut(body: Tensor, at: int, size: int) -> Tensor:
    if at + size > len(body):
        raise PayloadError(
            f"a body of {len(body)} bytes is cut short: {size} were expected from byte {at} on"
        )
    return body[at : at + size]


class PayloadBuffer:
    """Payloads as the body of a frame, in memory that all frames use again.

    Args:
        pieces: the format of each payload, from which its size follows.

    A payload of variable length is its length in 4 bytes, and its message.

    Attributes:
        nbytes: the bytes of the payloads.
        least, most: the least and the most bytes of the body.
    """

    def __init__(self, pieces: Sequence[PayloadSpec]) -> None:
        self._pieces = tuple(pieces)
        self._likes = [like(piece) for piece in pieces]
        self._flat: Payload = tuple(part for each in self._likes for part in each)
        self.nbytes = nbytes(self._flat)
        self._varies = any((piece.codec is not None and piece.codec.varies) for piece in pieces)
        sizes = [_extent(*each) for each in zip(pieces, self._likes, strict=True)]
        self.least, self.most = sum(least for least, _ in sizes), sum(most for _, most in sizes)
        self._body: Tensor | None = None
        self._buffer: Tensor | None = None
        self._payloads: tuple[Payload, ...] = ()
        self._places: list[Tensor] = []

    @property
    def buffer(self) -> Tensor:
        """The memory, as bytes."""
        if self._buffer is None:
            return self._keep(torch.empty(self.nbytes, dtype=torch.uint8))
        return self._buffer

    def use(self, x: Tensor) -> None:
        """Keep the bytes in this contiguous tensor from now on; it has as many."""
        assert x.numel() * x.element_size() == self.nbytes
        if self._buffer is None or self._buffer.data_ptr() != x.data_ptr():
            self._keep(x.view(-1).view(torch.uint8))

    def _keep(self, buffer: Tensor) -> Tensor:
        flat = iter(unpack(buffer, self._flat))
        self._payloads = tuple(tuple(next(flat) for _ in each) for each in self._likes)
        self._places = [part.view(-1).view(torch.uint8) for payload in self._payloads for part in payload]
        self._buffer = buffer
        return buffer

    def pack(self, payloads: Sequence[Payload], ahead: bool = False) -> list[Tensor]:
        """The body; a single tensor goes as it lies in memory, with no copy.

        Args:
            ahead: whether the parts of messages that have some were sent before, and are not in it.
        """
        flat = tuple([part for payload in payloads for part in payload])
        size = sum([part.nbytes for part in flat])
        if size != self.nbytes:
            raise AssertionError(f"payloads of {size} bytes, where {self.nbytes} were declared")
        if self._varies:
            return [torch.cat([*self._written(payloads, ahead)])]
        if len(flat) == 1 and flat[0].is_contiguous():
            return [flat[0].view(-1).view(torch.uint8)]
        body = self.buffer
        for place, part in zip(self._places, flat, strict=True):
            place.copy_(part.reshape(-1).view(torch.uint8))
        return [body]

    def _written(self, payloads: Sequence[Payload], ahead: bool) -> Iterator[Tensor]:
        for payload, piece in zip(payloads, self._pieces, strict=True):
            if piece.codec is not None and piece.codec.varies:
                sent = ahead and piece.codec.partial
                message = _NOTHING if sent else piece.codec.shortened(payload, piece.numel)
                yield torch.tensor([message.numel()], dtype=torch.int32).view(torch.uint8)
                yield message
            else:
                yield from (part.contiguous().view(-1).view(torch.uint8) for part in payload)

    def room(self, size: int) -> Tensor:
        """Where a body of so many bytes, from `least` to `most`, is to be read into; `arrived` comes next."""
        if not self._varies:
            return self.buffer
        self._body = torch.empty(size, dtype=torch.uint8)
        return self._body

    def arrived(self, parts: Mapping[int, Sequence[Tensor]] = MappingProxyType({})) -> None:
        """Decode the body that was received into the payloads.

        Args:
            parts: of the message of a piece, by its index, that came before the body.

        Raises:
            PayloadError: it has another format; the buffer must not be read then.
        """
        body, self._body = self._body, None
        if body is None:
            return
        at = 0
        for i, (payload, piece) in enumerate(zip(self.unpack(), self._pieces, strict=True)):
            if piece.codec is not None and piece.codec.varies:
                size = int.from_bytes(_cut(body, at, _LENGTH).numpy().tobytes(), sys.byteorder)
                message = _cut(body, at + _LENGTH, size)
                message = torch.cat([*parts[i], message]) if i in parts else message
                piece.codec.restore_(message, piece.numel, payload)
                at += _LENGTH + size
                continue
            for part in payload:
                size = part.numel() * part.element_size()
                part.view(-1).view(torch.uint8).copy_(_cut(body, at, size))
                at += size
        if at != len(body):
            raise PayloadError(f"a body of {len(body)} bytes, of which {at} belong to its payloads")

    def unpack(self) -> tuple[Payload, ...]:
        """The payloads that lie in the buffer, as views: the same ones each time."""
        if self._buffer is None:
            self._keep(torch.empty(self.nbytes, dtype=torch.uint8))
        return self._payloads


class DeclaredMessage:
    """A message that was declared, at either end: turns a `Message` into a frame and back.

    Args:
        number: under which it was declared.
        spec: how it is read.

    Attributes:
        pushed: the memory for its payloads; `pulled`, for those of the reply.
    """

    def __init__(self, number: int, spec: MessageSpec) -> None:
        self.number, self.spec = number, spec
        self.pushed, self.pulled = PayloadBuffer(spec.pieces), PayloadBuffer(spec.pulls)

    def frame(
        self,
        kind: FrameKind,
        sequence: int = 0,
        payloads: Sequence[Payload] = (),
        lr: float = 0.0,
        ahead: bool = False,
    ) -> tuple[Header, list[Tensor]]:
        """The frame of a message; `ahead`: as of `PayloadBuffer.pack`."""
        header = Header(kind, self.number, sequence, lr=lr)
        if kind == FrameKind.OFFER:
            return header, [payloads[0][0].view(torch.uint8)]
        return header, self.pushed.pack(payloads, ahead)

    def message(self, header: Header, body: Any) -> Message:
        """The message of a frame; the payloads of a push lie in `pushed`, those of an offer are `body`."""
        kind, sequence = FrameKind(header.kind), header.sequence or -self.number
        if kind == FrameKind.PUSH:
            payloads = self.pushed.unpack()
            return Message(kind, sequence, payloads, self.spec.pieces, self.spec.pulls, header.lr)
        if kind == FrameKind.OFFER:
            dtype = torch.float32 if self.spec.back is None else self.spec.back.dtype
            x = torch.empty(0, dtype=dtype) if body is None else body.view(dtype)
            return Message(kind, sequence, ((x,),))
        return Message(kind, sequence)
