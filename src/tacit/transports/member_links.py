"""How members connect: to their store, to each other, or by a hub; and a long message to one of them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from tacit import torch_compat
from tacit.torch_compat import HashStore, Store, TCPStore

if TYPE_CHECKING:
    from tacit.transports.relayed_group import HubConnection

T = TypeVar("T")
Groups = Sequence[dist.ProcessGroup]
_PIECE = 1 << 18
"""The bytes of one message of several."""
_GONE = "a member is gone that was to connect, or to send or take a state"
_LOOK, _SOON = 0.01, 0.001
"""Seconds between two looks: for the addresses of others, and for those of this process's other groups."""


def connected(host: str, port: int, timeout: float) -> Store:
    """A connection to the members' store that nobody else uses.

    Raises:
        RuntimeError: there is none within `timeout` seconds.
    """
    try:
        socket.create_connection(
            (host, port), timeout
        ).close()  # torch would print its frames, again and again
    except OSError as error:
        raise RuntimeError(f"{error.strerror or error}") from error
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def served(host: str, port: int) -> TCPStore:
    """A store that this process serves as long as the object lives; port 0 takes any free one.

    Raises:
        RuntimeError: the port is taken.
    """
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


def send_to(to: int, message: bytes, groups: Groups, is_off: Callable[[], bool]) -> None:
    """Send bytes to a member, who calls `receive_from`, by the connections of all these groups.

    A new one carries little at first, and twice as much after each round trip.

    Raises:
        RuntimeError: it is gone, or `is_off` says so.
    """

    def send() -> None:
        whole = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        pieces = zip((torch.tensor([len(message)]), *torch.split(whole, _PIECE)), cycle(groups), strict=False)
        _each_waited([dist.isend(piece, group=group, group_dst=to) for piece, group in pieces])

    in_thread(send, is_off)


def receive_from(source: int, groups: Groups, is_off: Callable[[], bool]) -> bytes:
    """The bytes that a member sends by `send_to`, by the same groups.

    Raises:
        RuntimeError: it is gone, or `is_off` says so.
    """

    def receive() -> bytes:
        size, places = torch.empty(1, dtype=torch.int64), cycle(groups)
        dist.recv(size, group=next(places), group_src=source)
        whole = torch.empty(int(size), dtype=torch.uint8)
        pieces = zip(torch.split(whole, _PIECE), places, strict=False)
        _each_waited([dist.irecv(piece, group=group, group_src=source) for piece, group in pieces])
        return whole.numpy().tobytes()

    return in_thread(receive, is_off)


def _each_waited(works: Sequence[dist.Work | None]) -> None:
    """Wait for each, in order: the time-out is of one message, and each has been asked for before."""
    for work in works:
        assert work is not None
        work.wait()


def in_thread(call: Callable[[], T], is_off: Callable[[], bool]) -> T:
    """The result of a call that Gloo may never return from, as it waits for somebody who is gone or frozen.

    Raises:
        RuntimeError: `is_off` said so first; the thread is left behind.
    """
    result = _begun(call)
    while wait([result], 0.05).not_done:
        if is_off():
            raise RuntimeError(_GONE)
    return result.result()


def _begun(call: Callable[[], T]) -> Future[T]:
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tacit-members", daemon=True).start()
    return result


# ---- where members meet -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """Where members find each other to connect.

    Attributes:
        name: equal on all of them, and used once.
        limit: how long they may take.
        is_off: whether one of them is known to be missing.
        make: makes groups for a rank of a size at once, each by a name and a backend.
        close: ends what the groups have in common, when all of them are destroyed.
        relayed: whether what ranks send goes by a hub: then collectives of all cost less than pairs.
    """

    name: str
    limit: timedelta
    is_off: Callable[[], bool]
    make: Callable[[int, int, Mapping[str, str]], list[dist.ProcessGroup]]
    close: Callable[[], None] = lambda: None
    relayed: bool = False


class Board(Protocol):
    """What members write for each other."""

    def write(self, key: str, text: str) -> None:
        """Write a text."""

    def texts(self, keys: Sequence[str]) -> list[str]:
        """What is written there; "": nothing yet."""


class _Addresses(Store):
    """Where Gloo leaves the addresses of this rank's connections, and looks for those of the others.

    The first ones of all groups travel in one text, which is written when all are there, and read at once.
    Others, of further connections or of what TORCH_DISTRIBUTED_DEBUG=DETAIL adds to a group, travel by
    themselves: a group sets them when it has got the first ones. By torch's trampolines for stores that are
    written in Python.

    Args:
        board: where the text is left.
        name: of it; used once.
        groups: how many are made.
        rank: this one, of `size`.
        is_off: whether others are not to be waited for any more.
    """

    def __init__(
        self, board: Board, name: str, groups: int, rank: int, size: int, is_off: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._board, self._name, self._groups, self._is_off = board, name, groups, is_off
        self._ranks, self._rank = range(size), rank
        self._mine: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: Any) -> None:
        """Gloo's; a key that a group sets after its first one is written by itself."""
        if len(self._mine) < self._groups:
            self._mine[key] = value.hex()
        else:
            self._board.write(f"{self._name} {key}", value.hex())

    def wait(self, keys: list[str], *_: object) -> None:
        """`get` waits."""

    def get(self, key: str) -> bytes:
        """Gloo's."""
        with self._lock:
            if not self._known:
                while len(self._mine) < self._groups:
                    self._pause(_SOON)
                self._board.write(f"{self._name}/{self._rank}", json.dumps(self._mine))
                for text in self._found([f"{self._name}/{each}" for each in self._ranks]):
                    self._known |= json.loads(text)
        return bytes.fromhex(self._known.get(key) or self._found([f"{self._name} {key}"])[0])

    def _found(self, keys: list[str]) -> list[str]:
        while not all(texts := self._board.texts(keys)):
            self._pause(_LOOK)
        return texts

    def _pause(self, seconds: float) -> None:
        if self._is_off():
            raise RuntimeError(_GONE)
        time.sleep(seconds)


def meeting_by(board: Board | None, name: str, limit: timedelta, is_off: Callable[[], bool]) -> Meeting:
    """Members connect to each other by Gloo; `board`: where they leave addresses. None: one that is alone."""

    def make(rank: int, size: int, named: Mapping[str, str]) -> list[dist.ProcessGroup]:
        until = time.monotonic() + limit.total_seconds()

        def is_over() -> bool:
            return is_off() or time.monotonic() > until

        first = next(iter(named))
        at = HashStore() if board is None else _Addresses(board, first, len(named), rank, size, is_over)
        groups = [
            _begun(partial(torch_compat.group_by_store, at, rank, size, backend, limit, each))
            for each, backend in named.items()
        ]
        made = [each.result() for each in groups if each.exception() is None]
        if len(made) < len(groups) or is_over():  # nobody waits for them any more
            for each in made:
                dist.destroy_process_group(each)
            raise RuntimeError(next((str(each.exception()) for each in groups if each.exception()), _GONE))
        return made

    return Meeting(name, limit, is_off, make)


def meeting_at(
    relay: HubConnection, name: str, limit: timedelta, is_off: Callable[[], bool], close: Callable[[], None]
) -> Meeting:
    """Members are connected to a hub; `relay`: a connection to it that nobody else uses."""
    from tacit.transports.relayed_group import RelayedGroup

    def make(rank: int, size: int, named: Mapping[str, str]) -> list[dist.ProcessGroup]:
        return [
            torch_compat.python_group(partial(RelayedGroup, relay, each, rank, size), rank, size, limit, each)
            for each in named
        ]

    return Meeting(name, limit, is_off, make, close=close, relayed=True)
