"""A long push to a server that averages, cut into chunks: some are answered while others are still sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tacit.contracts import Payload, PayloadSpec, Posted, PushPull

_LEAST_BYTES = 1 << 20
_MOST = 16


def long_piece(request: PushPull) -> int | None:
    """The index of the payload that is to be cut; None for a push that is sent whole.

    A payload is cut if push and answer are encoded entry by entry. This depends on sizes alone: all workers
    cut equally.
    """
    if request.do != "push":
        return None
    for i, (piece, pull) in enumerate(zip(request.pieces, request.pulls, strict=True)):
        if piece.numel * piece.dtype.itemsize >= 2 * _LEAST_BYTES and _plain(piece) and _plain(pull):
            return i
    return None


def _plain(piece: PayloadSpec) -> bool:
    return (piece.codec is None or piece.codec.entrywise) and piece.spans is None and not piece.has_feedback


def spans(piece: PayloadSpec) -> list[tuple[int, int]]:
    """The chunks (start, stop) of a long payload, of equal length except the last."""
    length = max(_LEAST_BYTES // piece.dtype.itemsize, -(-piece.numel // _MOST))
    return [(start, min(start + length, piece.numel)) for start in range(0, piece.numel, length)]


def chunk(request: PushPull, i: int, start: int, stop: int) -> PushPull:
    """The push of one chunk of payload `i`."""
    (x,) = request.payloads[i]
    mine, back = (replace(each[i], numel=stop - start) for each in (request.pieces, request.pulls))
    return replace(request, payloads=((x.view(-1)[start:stop],),), pieces=(mine,), pulls=(back,))


def rest(request: PushPull, i: int) -> PushPull:
    """The push of all payloads except `i`."""
    payloads, pieces, pulls = (
        (*each[:i], *each[i + 1 :]) for each in (request.payloads, request.pieces, request.pulls)
    )
    return replace(request, payloads=payloads, pieces=pieces, pulls=pulls)


@dataclass(eq=False)
class JoinedReply(Posted):
    """The reply to a push that was cut; `contracts.Posted`.

    Attributes:
        parts: the replies to the chunks, and to the rest if there is one.
        i: the index of the payload that was cut.
        whole: the replies to its chunks, one after the other.
        others: whether there is a rest.
    """

    parts: Sequence[Posted]
    i: int
    whole: Tensor
    others: bool
    sent: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.sent = sum(part.sent for part in self.parts)

    def on_done(self, call: Callable[[], None]) -> None:
        self._open = len(self.parts)

        def one() -> None:
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                call()

        for part in self.parts:
            part.on_done(one)

    def answer(self) -> tuple[Payload, ...]:
        answers: list[Any] = [part.answer() for part in self.parts]
        others = answers[-1] if self.others else ()
        return (*others[: self.i], (self.whole,), *others[self.i :])
