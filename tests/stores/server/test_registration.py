"""Who may join a server: one with the secret and of its version, in a place that nobody else has."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeAlias

import pytest
import torch
from shared_secret import SECRET
from torch._C._distributed_c10d import TCPStore
from worker_threads import BACK, PIECE, N, each, join, push

import attacks
from tacit.contracts import PushPull
from tacit.errors import AttachError, ConfigError, PeerLost, ServerLost
from tacit.stores import handshake
from tacit.stores.client.server_connection import PendingReply
from tacit.stores.messages import MessageSpec
from tacit.stores.protocol import FrameKind, Header
from tacit.stores.secret import Secret
from tacit.stores.server.__main__ import arguments
from tacit.stores.server.process import ServerProcess
from tacit.topologies import Asynchronous, StaleSynchronous, Star

Serve: TypeAlias = Callable[..., ServerProcess]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Be another process from now on, as far as servers can tell."""
    return lambda: monkeypatch.setattr(
        "tacit.stores.client.server_connection._PROCESS", f"another, at {time.monotonic()}"
    )


def until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)


# ---- a place that somebody has ------------------------------------------------------------------------


def test_a_worker_that_is_alive_keeps_its_place(serve: Serve, other: Callable[[], None]) -> None:
    host = serve(2)
    servers = [join(host, i) for i in range(2)]
    other()
    started = time.monotonic()
    with pytest.raises(AttachError, match=r"rank 1 is at work already, from 127\.0\.0\.1:\d+: give each"):
        join(host, 1)
    assert time.monotonic() - started < 5, "it was asked, and answered"
    found = each(*(lambda s=s: push(s, torch.ones(N)) for s in servers))
    assert all(isinstance(x, torch.Tensor) for x in found)


def test_two_that_come_at_once_do_not_both_get_it(serve: Serve, other: Callable[[], None]) -> None:
    host, star = serve(1), Star(Asynchronous())
    first = join(host, 0, 1, star)
    first._channel.drop()
    other()

    def come(i: int) -> object:
        return join(host, 0, 1, star)

    # Of one process they are, but that is looked at only where the first has the place.
    results = each(*(lambda i=i: come(i) for i in range(4)))
    assert sum(isinstance(result, AttachError) for result in results) == 3
    (joined,) = [result for result in results if not isinstance(result, Exception)]
    joined.enter(torch.zeros(N), "a/0", BACK)  # type: ignore[attr-defined]
    assert torch.equal(push(joined, torch.ones(N)), torch.ones(N))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_one_that_comes_back_has_its_place_again(serve: Serve, other: Callable[[], None], how: str) -> None:
    host, star = serve(2), Star(Asynchronous())
    first, steady = join(host, 0, star=star), join(host, 1, star=star)
    each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in (first, steady)])
    push(first, torch.ones(N))
    if how == "gone":
        first._channel.drop()
    else:
        thawed = threading.Event()
        first._hear = thawed.wait  # type: ignore[method-assign, assignment]
    other()
    again = join(host, 0, star=star, seconds=4)
    assert torch.equal(again.enter(torch.zeros(N), "a/0", BACK), torch.full((N,), 0.5))
    assert again.clock("a/0") == 1
    assert torch.equal(push(again, torch.ones(N)), torch.ones(N))
    if how == "frozen":
        del first._hear  # type: ignore[method-assign]
        thawed.set()
    with pytest.raises(ServerLost):
        push(first, torch.ones(N))
    for server in (again, steady):
        server.close()


# ---- versions and secrets -----------------------------------------------------------------------------


def test_another_secret_is_said_on_both_sides(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    host = serve(1)
    with pytest.raises(AttachError, match=r"server 0 \(127\.0\.0\.1:\d+\) has another secret than this"):
        join(host, 0, 1, secret=Secret(b"another secret of some length"))
    until(lambda: caplog.records)
    (record,) = caplog.records
    assert "was closed: it does not know the secret" in record.message
    join(host, 0, 1).close()


@contextmanager
def speaking(first: bytes) -> Iterator[int]:
    """Something else on a port, which says this to whoever connects, and no more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        over = threading.Event()

        def serve() -> None:
            listener.settimeout(0.1)
            lines = []
            while not over.is_set():
                try:
                    lines.append(listener.accept()[0])
                    lines[-1].sendall(first)
                except TimeoutError:
                    pass
            for line in lines:
                line.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        over.set()
        thread.join()


class At:
    """Where something listens."""

    def __init__(self, port: int) -> None:
        self.port = port


def test_a_server_of_another_version_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = bytearray(handshake.greeting())
    struct.pack_into("<H", greeting, 8, handshake.VERSION + 1)
    with (
        speaking(bytes(greeting)) as port,
        pytest.raises(
            AttachError, match=r"is of another version of tacit .*: install the same version there"
        ),
    ):
        join(At(port), 0, 1)  # type: ignore[arg-type]


def test_a_worker_of_another_version_is_said(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    host = serve(1)
    line = socket.create_connection(("127.0.0.1", host.port), 5)
    line.recv(handshake.GREETING_BYTES, socket.MSG_WAITALL)
    reply = bytearray(handshake.reply(SECRET, handshake.greeting()))
    struct.pack_into("<H", reply, 8, handshake.VERSION - 1)
    line.sendall(reply)
    verdict = line.recv(handshake.VERDICT_BYTES, socket.MSG_WAITALL)
    assert verdict[0] == handshake.Verdict.OTHER_VERSION
    assert attacks.ended(line, 5)
    until(lambda: caplog.records)
    (record,) = caplog.records
    assert "was closed: it is a worker of another version of tacit" in record.message


def test_something_else_on_the_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        speaking(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as port,
        pytest.raises(AttachError, match="is no parameter server of tacit: check its address"),
    ):
        join(At(port), 0, 1)  # type: ignore[arg-type]
    monkeypatch.setattr(handshake, "SECONDS", 0.5)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    with pytest.raises(ServerLost, match=r"cannot be reached: .*Start it there"):
        join(At(store.port), 0, 1, seconds=-2)  # type: ignore[arg-type]


# ---- where it listens ---------------------------------------------------------------------------------


def test_it_listens_where_it_is_told(serve: Serve) -> None:
    host = serve(1, host="127.0.0.2")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", host.port), 2).close()
    socket.create_connection(("127.0.0.2", host.port), 2).close()


def test_not_told_it_listens_on_the_loopback_alone(serve: Serve) -> None:
    assert arguments().parse_args(["--workers", "1", "--port", "1"]).host == "127.0.0.1"
    host = serve(1)
    socket.create_connection(("127.0.0.1", host.port), 2).close()
    for elsewhere in ("127.0.0.2", "::1"):
        with pytest.raises(OSError, match=r"refused|assign requested|not supported"):
            socket.create_connection((elsewhere, host.port), 2).close()


@pytest.mark.parametrize(
    ("host", "port", "says"),
    [
        ("192.0.2.1", 0, r"--host 192\.0\.2\.1 is no address of this machine: write one that it has"),
        ("no such host.invalid", 0, r"--host no such host\.invalid is no address: write one of this machine"),
        ("127.0.0.1", 70_000, "--port 70000 is none: write one from 1 to 65535"),
        ("127.0.0.1", -1, "--port -1 is none"),
    ],
)
def test_where_it_cannot_listen_is_said(host: str, port: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerProcess(1, port, secret=SECRET, host=host)


# ---- how long it waits --------------------------------------------------------------------------------


def test_it_waits_as_long_as_its_workers_say(serve: Serve) -> None:
    """A time-out of its own would take a slow one for lost, or let the others wait for a frozen one."""
    host = serve(2, timeout=None)
    servers = [join(host, i, seconds=1.5) for i in range(2)]
    started = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 was silent for 1\.5 s while others waited for it"):
        push(servers[0], torch.ones(N))
    assert 1.5 < time.monotonic() - started < 1.5 + 10
    patient = serve(2, timeout=None)
    servers = [join(patient, i, seconds=30) for i in range(2)]

    def slow() -> torch.Tensor:
        time.sleep(3)
        return push(servers[1], torch.ones(N))

    found = each(lambda: push(servers[0], torch.ones(N)), slow)
    assert all(isinstance(x, torch.Tensor) for x in found), found


def test_it_can_be_told_otherwise(serve: Serve) -> None:
    host = serve(2, timeout=1.0)
    servers = [join(host, i, seconds=60) for i in range(2)]
    with pytest.raises(PeerLost, match="rank 1 was silent for 1 s while others waited for it"):
        push(servers[0], torch.ones(N))


def test_one_that_waits_longer_than_workers_tells_them_to_wait_in_time(serve: Serve) -> None:
    """Else a worker would take the server for lost, as of its own patience."""
    host = serve(2, timeout=100.0)
    servers = [join(host, i, seconds=0.1) for i in range(2)]
    first: list[object] = []
    thread = threading.Thread(target=lambda: first.append(push(servers[0], torch.ones(N))))
    thread.start()
    time.sleep(7)  # the worker's patience is 5.15 s
    push(servers[1], torch.ones(N))
    thread.join(10)
    assert isinstance(first[0], torch.Tensor)


def test_bytes_that_come_slowly_are_heard(serve: Serve) -> None:
    """A long push over a slow link is no silence."""
    host, star = serve(2, timeout=2.0), Star(StaleSynchronous(0))
    servers = [join(host, i, star=star) for i in range(2)]
    each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in servers])
    push_of = servers[1]
    first: list[object] = []
    thread = threading.Thread(target=lambda: first.append(push(servers[0], torch.ones(N))))
    thread.start()
    x, sent = torch.ones(N), push_of._channel._socket
    ask = PushPull(((x,),), (PIECE,), (BACK,))
    declared = push_of._declare(FrameKind.PUSH, MessageSpec("a/0", ask.pieces, ask.pulls))
    asked = PendingReply(declared.pulled)
    push_of._open[declared.number] = asked
    header = Header(FrameKind.PUSH, declared.number, 1, declared.pushed.nbytes)
    whole = struct.pack("<4qd2q", *header) + x.numpy().tobytes()
    step = len(whole) // 10
    for start in range(0, len(whole), step):
        sent.sendall(whole[start : start + step])
        time.sleep(0.5)
    assert asked.done.wait(10)
    assert asked.error is None
    thread.join(10)
    assert isinstance(first[0], torch.Tensor)
