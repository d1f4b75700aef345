"""A store whose calls time out: torch's wait for ever if its node cannot be reached any more."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from tacit.errors import PeerLost
from tacit.torch_compat import default_store
from tacit.transports.process_groups import rank_in

T = TypeVar("T")

_HOST = "tacit/host"


class Unreachable(dist.DistNetworkError):
    """The launcher's store has not answered in time."""


def is_hosted_here(store: object) -> bool:
    """Whether this process serves the TCPStore, as rank 0 does without torchrun."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return "server=TCPServer" in repr(store)


def host_store() -> None:
    """Report to the other ranks if this process serves the store; called before they compare."""
    if is_hosted_here(default_store()):
        default_store().set(_HOST, str(rank_in()))


def store_host() -> int | None:
    """The rank whose process serves the store; None: the launcher's does."""
    store = default_store()
    return int(store.get(_HOST)) if store.check([_HOST]) else None


def store_gone(error: dist.DistError, host: int | None, after: str = "") -> PeerLost:
    """The error if the store has failed; `host`: see `store_host`; `after`: an earlier error."""
    if isinstance(error, Unreachable):
        return PeerLost(f"{error}: this rank is cut off from the node that holds it, or that node is{after}")
    who = (
        "the launcher's store is gone, and with it the node that held it"
        if host is None
        else f"rank {host} is gone, which held the store by which ranks find each other"
    )
    return PeerLost(f"{who}: {error}{after}")


class KeyValueStore(Protocol):
    """The methods of torch's stores that tacit uses."""

    def get(self, key: str, /) -> bytes:
        """The value of a key; waits for one."""

    def set(self, key: str, value: str, /) -> None:
        """Give a key a value."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number under a key; returns the sum."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys have values."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Give a key a value if it has the expected one; returns the value that it has then."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys; waits for them."""


class StoreConnection(KeyValueStore):
    """One that holds its connection until it is closed; torch's end theirs when nobody has them any more.

    Its `multi_get` does not wait: a key without a value has the empty one.
    """

    def close(self) -> None:
        """End the connection: whoever waits for an answer is told."""
        raise NotImplementedError


JOIN_SECONDS = 1.0
"""Seconds that the thread of a store that answers has to end."""


class BoundedStore(KeyValueStore):
    """A store whose calls time out, as a separate thread makes them.

    `set_timeout` of torch's stores bounds `get` and `wait` only; other calls wait until TCP gives up, which
    takes a quarter of an hour. After a call without an answer others fail at once, as the thread still waits.

    Args:
        store: a client with no other user.
        seconds: the time-out of a call.
    """

    def __init__(self, store: KeyValueStore, seconds: float) -> None:
        self._caller = _Caller(store)
        self._seconds = seconds

    def within(self, seconds: float) -> BoundedStore:
        """The same store and thread, with a shorter time-out."""
        other = BoundedStore.__new__(BoundedStore)
        other._caller, other._seconds = self._caller, min(seconds, self._seconds)
        return other

    def close(self) -> None:
        """End the thread after its present call, and the connection; later calls raise `Unreachable`."""
        self._caller.close()

    def get(self, key: str) -> bytes:
        return self._ask(lambda store: store.get(key))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda store: store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda store: store.check(keys))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask(lambda store: store.compare_set(key, expected, value))

    def append(self, key: str, value: str) -> None:
        """Add to the end of a key's value."""
        self._ask(partial(_append, key=key, value=value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(lambda store: store.multi_get(keys))

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The values of keys, of one without a value the empty text, in the time of two answers."""

        def read(store: KeyValueStore) -> list[str]:
            if not isinstance(store, StoreConnection):  # torch's would wait for a key that has none
                for key in keys:
                    _append(store, key, "")
            return [each.decode() for each in store.multi_get([*keys])]

        return self._ask(read)

    def _ask(self, call: Callable[[KeyValueStore], T]) -> T:
        return self._caller.ask(call, self._seconds)


def _append(store: Any, key: str, value: str) -> None:
    store.append(key, value)  # torch's stores have it, and their stubs do not


class _Caller:
    """The thread that makes the calls, and its queue."""

    def __init__(self, store: KeyValueStore) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[KeyValueStore], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._store = store
        self._unreachable = self._closed = False
        self._thread = threading.Thread(target=self._run, name="tacit-store", daemon=True)
        self._thread.start()

    def ask(self, call: Callable[[KeyValueStore], T], seconds: float) -> T:
        answer: Future[T] = Future()
        self._calls.put((call, answer))
        self._unreachable = self._unreachable or self._closed or bool(wait([answer], seconds).not_done)
        if self._unreachable:
            raise Unreachable(f"the launcher's store cannot be reached: no answer within {seconds:g} s")
        return answer.result()

    def close(self) -> None:
        self._closed = True
        self._calls.put(None)
        if isinstance(self._store, StoreConnection):
            self._store.close()
        if not self._unreachable and self._thread is not threading.current_thread():
            self._thread.join(
                JOIN_SECONDS
            )  # one that gives up the store while Python ends aborts the process

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.set_result(call(self._store))
            except BaseException as error:
                answer.set_exception(error)
