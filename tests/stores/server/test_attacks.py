"""Every attack of benchmarks/attacks.py on a server whose workers train on, to the last bit as without it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from shared_secret import SECRET
from torch import Tensor
from worker_threads import BACK, MODEL, N, each, join, push

import attacks
from attacks import ATTACKS, SPARED, Target
from tacit.errors import AttachError, ServerLost
from tacit.stores import handshake
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.messages import RunSpec
from tacit.stores.protocol import Header
from tacit.stores.server.process import ServerProcess
from tacit.topologies import Asynchronous, Star

LEAST, WORKERS = 10, 2


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that real networks need, and tests need not wait for."""
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    monkeypatch.setattr("tacit.stores.server.liveness._HELLO_SECONDS", 1.0)
    monkeypatch.setattr(attacks, "PATIENCE", 6.0)


def assaulted(name: str, at: Target) -> tuple[threading.Thread, list[attacks.Seen]]:
    """An attack that has begun; what it has seen, once it is over."""
    seen: list[attacks.Seen] = []
    attack = threading.Thread(
        target=lambda: seen.append(ATTACKS[name].run(at, random.Random(0))), daemon=True
    )
    attack.start()
    return attack, seen


def target(host: ServerProcess, star: Star, free: int | None = None) -> Target:
    return Target(
        ("127.0.0.1", host.port),
        SECRET,
        handshake.reply(SECRET, handshake.greeting()),
        RunSpec(star, (), MODEL),
        host.workers,
        free,
        seconds=0.5,
        many=200,
    )


@pytest.mark.parametrize("name", [name for name, known in ATTACKS.items() if known.who != "worker"])
def test_workers_train_on_as_if_nobody_was_there(
    name: str, serve: Callable[..., ServerProcess], caplog: pytest.LogCaptureFixture
) -> None:
    host, star = serve(WORKERS, timeout=20), Star()
    servers = [join(host, i) for i in range(WORKERS)]
    stop, steps = threading.Event(), 0
    attack, seen = assaulted(name, target(host, star))
    try:
        while attack.is_alive() or steps < LEAST:
            xs = [torch.full((N,), steps + 10.0 * i) for i in range(WORKERS)]
            means = each(*(lambda s=s, x=x: push(s, x) for s, x in zip(servers, xs, strict=True)))
            for mean in means:
                assert isinstance(mean, Tensor), mean
                assert torch.equal(mean, torch.full((N,), steps + 5.0)), f"step {steps}"
            steps += 1
            stop.wait(0.02)
    finally:  # else it would go on beside the next test
        attack.join(60)
    assert not attack.is_alive()
    assert seen, "the attack itself failed"
    assert seen[0].opened > 0
    if name not in SPARED:
        assert seen[0].ended == seen[0].opened, seen
    join_again = join_and_close(host, servers[0])
    assert join_again, "nobody else is let in"
    for server in servers[1:]:
        server.close()
    host.thread.join(10)  # type: ignore[attr-defined]
    assert not host.thread.is_alive()  # type: ignore[attr-defined]
    assert len(caplog.records) <= 4, "said once of each address, and then ever more seldom"
    assert not [
        each for each in caplog.records if "this server" in each.message and "cannot take" in each.message
    ]
    assert not Path("/tmp/tacit-was-called").exists()


def join_and_close(host: ServerProcess, first: ServerClient) -> bool:
    """Leave, come back, and leave."""
    first.close()
    again = join(host, 0)
    again.close()
    return True


@pytest.mark.parametrize("name", [name for name, known in ATTACKS.items() if known.who == "worker"])
def test_a_worker_that_does_what_none_would_is_alone_in_it(
    name: str, serve: Callable[..., ServerProcess]
) -> None:
    star, others = Star(Asynchronous()), 3
    host = serve(others + 1, timeout=20)
    servers = [join(host, i, others + 1, star) for i in range(others)]
    each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in servers])
    attack, seen = assaulted(name, target(host, star, others))
    pause, steps = threading.Event(), 0
    try:
        while attack.is_alive() or steps < LEAST:
            for server in servers:
                last = push(server, torch.ones(N))
                steps += 1
                # Each push moves by 1/4, and a sum of quarters is exact however many there are.
                assert torch.equal(last, torch.full((N,), steps / (others + 1))), f"step {steps}"
            pause.wait(0.01)
    finally:  # else it would go on beside the next test
        attack.join(60)
    assert not attack.is_alive()
    assert seen, "the attack itself failed"
    assert seen[0].ended == seen[0].opened
    assert sum(host.stats()["stale"].values()) == steps
    for server in servers:
        server.close()


def closed(lines: Sequence[socket.socket], least: int, seconds: float = 10) -> int:
    """How many of them the server has closed; looks until there are that many, and a moment longer."""
    found: set[socket.socket] = set()
    now = time.monotonic()
    until, more = now + seconds, 0.3
    while time.monotonic() < until:
        for line in [line for line in lines if line not in found]:
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                try:
                    over = not line.recv(1 << 16)
                except ConnectionError:
                    over = True
                if over:
                    found.add(line)
        if len(found) >= least:
            until, more = min(until, time.monotonic() + more), 0.0
        time.sleep(0.02)
    return len(found)


def test_with_every_place_taken_by_strangers_a_worker_still_comes_in(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 60.0)
    host, star = serve(1), Star()
    lines = [attacks.dialled(target(host, star)) for _ in range(1000)]
    server = join(host, 0, 1, seconds=10)
    assert torch.equal(push(server, torch.ones(N)), torch.ones(N))
    server.close()
    assert 1000 - 128 <= closed(lines, 1000 - 128) <= 1000 - 127, "one more for the worker"
    for line in lines:
        line.close()


def test_of_those_that_know_the_secret_a_few_have_room_beside_the_workers(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tacit.stores.server.liveness._HELLO_SECONDS", 60.0)
    host, star = serve(WORKERS), Star()
    lines = [attacks.inside(target(host, star)) for _ in range(60)]
    turned_away = 60 - (4 * WORKERS + 16)
    assert closed(lines, turned_away) == turned_away
    assert "24 others are connected that know the secret" in caplog.records[0].message
    for line in lines:
        line.close()
    servers: list[ServerClient] = []
    until = time.monotonic() + 20
    while not servers and time.monotonic() < until:
        with contextlib.suppress(AttachError, ServerLost):
            servers.append(join(host, 0))
    assert servers, "nobody else is let in"


def test_who_was_refused_is_given_time_to_go_and_no_place_for_ever(
    serve: Callable[..., ServerProcess],
) -> None:
    at = target(serve(WORKERS), Star())
    line = attacks.inside(at)
    line.sendall(attacks.framed(attacks.hello(at, 0, workers=7)))
    header = Header(*attacks.FORM.unpack(attacks.exactly(line, attacks.FORM.size)))
    assert b"worker 0 is one of 7" in attacks.exactly(line, header.nbytes)
    assert attacks.ended(line)


def test_seconds_of_a_worker_are_not_those_of_a_stranger(serve: Callable[..., ServerProcess]) -> None:
    """Proved and welcome, a connection may be silent for as long as it likes."""
    host = serve(1)
    server = join(host, 0, 1)
    threading.Event().wait(2.5)
    assert torch.equal(push(server, torch.ones(N)), torch.ones(N))
    server.close()
