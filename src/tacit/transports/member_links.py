"""What members have besides collectives: a connection to their store, and a long message to one of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from tacit.torch_compat import Store, TCPStore

T = TypeVar("T")
_PIECE = 1 << 20
"""The bytes of one message of several."""


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


def send_to(to: int, message: bytes, group: dist.ProcessGroup, is_off: Callable[[], bool]) -> None:
    """Send bytes to a member, who calls `receive_from`.

    Raises:
        RuntimeError: it is gone, or `is_off` says so.
    """

    def send() -> None:
        whole = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for piece in (torch.tensor([len(message)]), *torch.split(whole, _PIECE)):
            dist.send(piece, group=group, group_dst=to)

    in_thread(send, is_off)


def receive_from(source: int, group: dist.ProcessGroup, is_off: Callable[[], bool]) -> bytes:
    """The bytes that a member sends by `send_to`.

    Raises:
        RuntimeError: it is gone, or `is_off` says so.
    """

    def receive() -> bytes:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, group=group, group_src=source)
        whole = torch.empty(int(size), dtype=torch.uint8)
        for piece in torch.split(whole, _PIECE):
            dist.recv(piece, group=group, group_src=source)
        return whole.numpy().tobytes()

    return in_thread(receive, is_off)


def in_thread(call: Callable[[], T], is_off: Callable[[], bool]) -> T:
    """The result of a call that Gloo may never return from, as it waits for somebody who is gone or frozen.

    Raises:
        RuntimeError: `is_off` said so first; the thread is left behind.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="tacit-members", daemon=True).start()
    while wait([result], 0.05).not_done:
        if is_off():
            raise RuntimeError("a member is gone that was to connect, or to send or take a state")
    return result.result()
