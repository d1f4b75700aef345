"""One worker and one parameter server: a process group of two, and the frames that travel in it.

A frame is a header of fixed size, and a body of as many bytes as the header says. The group is made through
the server's store, under the number of the worker's incarnation: so a worker that comes back never meets what
was meant for the one before it.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from tacit.contracts import Payload, Piece
from tacit.errors import ConfigError
from tacit.transports.meter import like
from tacit.transports.wire import nbytes, pack_, unpack


class Kind(IntEnum):
    """What a frame is."""

    # from a worker
    HELLO = 1
    DECLARE = 2
    ENTER = 3
    OFFER = 4
    PUSH = 5
    PULL = 6
    MEET = 7
    STATS = 8
    LEAVE = 9
    # from a server
    ANSWER = 20
    WAIT = 21
    PEER_LOST = 22
    REFUSED = 23
    MISFIT = 24
    DROPPED = 25


class Header(NamedTuple):
    """What stands before a body.

    Attributes:
        spec: which declared message it is, or answers.
        sequence: the worker's number of the message that it is, or answers.
        nbytes: of the body.
        lr: the learning rate of a push.
        stale: of an answer, how many others' pushes had been applied since the worker pulled.
        queued: of an answer, how many microseconds the message has waited for its turn.
    """

    kind: int
    spec: int = 0
    sequence: int = 0
    nbytes: int = 0
    lr: float = 0.0
    stale: int = 0
    queued: int = 0


_FORM = struct.Struct("<4qd2q")

_Leaving: TypeAlias = tuple[Any, Tensor]
"""A message on its way, and what it holds."""


class Pair:
    """This end of a group of two. One thread sends and one receives; they may be two.

    Args:
        store: the server's; `name` is told to nobody else.
        me: 0 for the server, 1 for the worker.
        timeout: how long to wait for the other end to come.
    """

    def __init__(self, store: Store, name: str, me: int, timeout: timedelta) -> None:
        self._peer = 1 - me
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(name, store), me, 2, timeout)
        self._leaving: dict[int, tuple[list[_Leaving], list[_Leaving]]] = {}

    def send(self, header: Header, body: Sequence[Tensor] = ()) -> None:
        """Send a frame; its body, bytes, must stay as it is until the other end has answered.

        Raises:
            RuntimeError: the other end is gone.
        """
        size = sum(part.numel() for part in body)
        head = torch.frombuffer(bytearray(_FORM.pack(*header._replace(nbytes=size))), dtype=torch.uint8)
        sent = [(self._group.send([part], self._peer, 0), part) for part in (head, *body) if part.numel()]
        # Gloo gives up a message of which nobody keeps hold. What was sent up to the last answer has arrived,
        # as the other end has asked again; frames that have told it since then to wait perhaps have not.
        _, now = self._leaving.get(header.spec, ([], []))
        now += sent
        self._leaving[header.spec] = ([], now) if header.kind == Kind.WAIT else (now, [])

    def drop(self) -> None:
        """Close the connection, so that the other end knows; nothing can be sent afterwards."""
        self._leaving.clear()
        self._group = None

    def header(self, timeout: timedelta) -> Header:
        """Wait for the next frame's header.

        Raises:
            RuntimeError: the other end is gone, or silent for so long; then the group is of no more use.
        """
        head = torch.empty(_FORM.size, dtype=torch.uint8)
        self.body(head, timeout)
        return Header(*_FORM.unpack(head.numpy().tobytes()))

    def body(self, into: Tensor, timeout: timedelta) -> None:
        """Wait for bytes."""
        if into.numel():
            self._group.recv([into], self._peer, 0).wait(timeout)

    def text(self, header: Header, timeout: timedelta) -> bytes:
        """Wait for a body that is no payload."""
        into = torch.empty(header.nbytes, dtype=torch.uint8)
        self.body(into, timeout)
        return into.numpy().tobytes()


def as_body(text: bytes) -> list[Tensor]:
    """Bytes as the body of a frame."""
    return [torch.frombuffer(bytearray(text), dtype=torch.uint8)] if text else []


# ---- payloads -----------------------------------------------------------------------------------------


class Parcel:
    """Payloads as one body, in a buffer that is kept.

    Args:
        pieces: how each of them is read.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._likes = [like(piece) for piece in pieces]
        self._flat: Payload = tuple(part for each in self._likes for part in each)
        self.nbytes = nbytes(self._flat)
        self._buffer: Tensor | None = None

    @property
    def buffer(self) -> Tensor:
        """The kept bytes."""
        if self._buffer is None:
            self._buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        return self._buffer

    def lie_in(self, x: Tensor) -> None:
        """Keep the bytes in this contiguous tensor from now on."""
        assert x.numel() * x.element_size() == self.nbytes
        self._buffer = x.view(-1).view(torch.uint8)

    def pack(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """The body; a single tensor goes as it lies in memory, with no copy."""
        flat = tuple(part for payload in payloads for part in payload)
        if nbytes(flat) != self.nbytes:
            raise AssertionError(f"payloads of {nbytes(flat)} bytes, where {self.nbytes} were declared")
        if len(flat) == 1 and flat[0].is_contiguous():
            return [flat[0].view(-1).view(torch.uint8)]
        pack_(flat, self.buffer)
        return [self.buffer]

    def unpack(self) -> tuple[Payload, ...]:
        """The payloads that lie in the buffer, as views."""
        flat = iter(unpack(self.buffer, self._flat))
        return tuple(tuple(next(flat) for _ in each) for each in self._likes)


# ---- what is told of payloads -------------------------------------------------------------------------


def dumps(told: Any) -> bytes:
    """Plain values, pieces and tacit's own hyper-parameters, as bytes."""
    return pickle.dumps(_plain(told))


def loads(text: bytes) -> Any:
    """Them back.

    Raises:
        ConfigError: there is something else among them, of which a server knows nothing.
    """
    return _rich(_Known(io.BytesIO(text)).load())


_TOLD = ("tacit.compressors.", "tacit.predictors.")


class _Known(pickle.Unpickler):
    """Makes only what tacit itself declares: nobody can have a server run anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_TOLD) or module in ("tacit.contracts", "tacit.topologies.star"):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise ConfigError(
            f"a server can read only what tacit's own compressors say, and was told of {module}.{name}: use "
            "one of tacit.compressors"
        )


_PIECE = "\0piece"


def _plain(told: Any) -> Any:
    if isinstance(told, Piece):
        dtype = str(told.dtype).removeprefix("torch.")
        return (_PIECE, told.codec, told.numel, dtype, told.owes, told.spans)
    if isinstance(told, list):
        return [_plain(each) for each in told]
    return {key: _plain(each) for key, each in told.items()} if isinstance(told, dict) else told


def _rich(told: Any) -> Any:
    if isinstance(told, tuple) and told[:1] == (_PIECE,):
        _, codec, numel, dtype, owes, spans = told
        return Piece(codec, numel, getattr(torch, dtype), owes, spans)
    if isinstance(told, list):
        return [_rich(each) for each in told]
    return {key: _rich(each) for key, each in told.items()} if isinstance(told, dict) else told
