"""A message from each rank to one other: a `Permute` by torch.distributed.

Gloo's send and receive were faster than its all-to-all with nothing for the others, up to a megabyte, and as
fast at eight (`dev/log`, 2026-11-25). Gloo has no callback for either, so threads wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import AxisRank, Payload, Permute
from tacit.transports.message_layout import pack_, unpack

Message: TypeAlias = Callable[[str, Payload], Tensor]
"""(key, payload) -> a buffer for a message that holds such a payload."""
Read: TypeAlias = Callable[[], Payload | None]
"""Reads the answer, when the started messages are done."""


def posted(
    request: Permute, place: AxisRank, group: dist.ProcessGroup, tag: int, message: Message
) -> tuple[list[dist.Work], Read]:
    """Start a receive and a send, if this rank has them, without waiting for another rank.

    Two messages of one pair and tag are matched in the order in which they were posted, which must be the
    same on both sides. Receives are posted first: otherwise Gloo sends messages that cross one after the
    other.
    """
    source, end = request.comes_from(place.rank), request.to[place.rank]
    works: list[dist.Work | None] = []
    read: Read = lambda: None  # noqa: E731
    if source is not None:
        arrived = _as_it_lies(request.into)
        if arrived is None:
            arrived = message("arriving", request.arriving)
            read = _reader(request, arrived)
        else:
            read = lambda: request.into  # noqa: E731
        works.append(dist.irecv(arrived, group=group, tag=tag, group_src=source))
    if end is not None:
        leaving = _as_it_lies(request.payload)
        if leaving is None:
            leaving = message("leaving", request.payload)
            pack_(request.payload, leaving)
        works.append(dist.isend(leaving, group=group, tag=tag, group_dst=end))
    return [work for work in works if work is not None], read


def in_stream(request: Permute, place: AxisRank, group: dist.ProcessGroup, message: Message) -> Read:
    """Launch it on a stream, where a launch counts as done: a batch of a send and a receive of each tensor.

    So nothing is packed. Ranks that neither send nor receive launch nothing.
    """
    source, end = request.comes_from(place.rank), request.to[place.rank]
    arrived: Payload | None = None
    batch: list[dist.P2POp] = []
    if source is not None:
        arrived = request.into or unpack(message("arriving", request.payload), request.payload)
        batch += [dist.P2POp(dist.irecv, each, group=group, group_peer=source) for each in arrived]
    if end is not None:
        leaving = [each.contiguous() for each in request.payload]
        batch += [dist.P2POp(dist.isend, each, group=group, group_peer=end) for each in leaving]
    batch = [each for each in batch if each.tensor.numel()]
    for work in dist.batch_isend_irecv(batch) if batch else ():
        work.wait()  # the stream waits; the host does not
    return lambda: arrived


def _as_it_lies(payload: Payload) -> Tensor | None:
    """The only tensor of a payload, if it can be sent without a copy."""
    return payload[0] if len(payload) == 1 and payload[0].is_contiguous() else None


def _reader(request: Permute, message: Tensor) -> Read:
    def read() -> Payload:
        arrived = unpack(message, request.arriving)
        for tensor, view in zip(request.into, arrived, strict=bool(request.into)):
            tensor.copy_(view)
        return request.into or arrived

    return read


class Waited(Protocol):
    """A handle that can only be waited for."""

    def wait(self) -> object:
        """Return when it is done; raise its error."""


_Done: TypeAlias = "torch.futures.Future[None]"
_Orders: TypeAlias = "SimpleQueue[tuple[Sequence[Waited], _Done] | None]"


class Waiters:
    """A pool with one thread for each message under way at a time."""

    def __init__(self) -> None:
        self._idle: list[_Orders] = []
        self._lock = threading.Lock()
        self._closed = False

    def wait(self, works: Sequence[Waited]) -> _Done:
        """A future that is done when all works are, or one has failed."""
        future: _Done = torch.futures.Future()
        with self._lock:
            orders = self._idle.pop() if self._idle else None
        if orders is None:
            orders = SimpleQueue()
            threading.Thread(target=self._run, args=(orders,), name="tacit-waiter", daemon=True).start()
        orders.put((works, future))
        return future

    def close(self) -> None:
        """End idle threads now, and the others when they are done."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for orders in idle:
            orders.put(None)

    def _run(self, orders: _Orders) -> None:
        while (order := orders.get()) is not None:
            _wait(*order)
            del order  # so that buffers can be freed
            with self._lock:
                if self._closed:
                    return
                self._idle.append(orders)


def _wait(works: Sequence[Waited], future: _Done) -> None:
    failure: Exception | None = None
    for work in works:
        try:
            work.wait()
        except Exception as error:
            if failure is None:  # at once: the others may take until their time-out
                failure = error
                future.set_exception(failure)  # type: ignore[arg-type]
    if failure is None:
        future.set_result(None)
