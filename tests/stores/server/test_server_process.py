"""A server and its workers over Gloo, in threads of one process: joins, pushes, refusals, restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_secret import SECRET
from torch import Tensor
from worker_threads import BACK, MODEL, PIECE, N, each, join, push

from tacit.compressors import Dense, Sign
from tacit.contracts import AxisRank, Context, PayloadSpec, PushPull
from tacit.errors import AttachError, ConfigError, PayloadError, PeerLost, ServerLost
from tacit.stores.client.placement import addresses
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.messages import RunSpec
from tacit.stores.protocol import FrameKind
from tacit.stores.server.connection import Arrival
from tacit.stores.server.payloads import BufferWorkspace
from tacit.stores.server.process import ServerProcess
from tacit.topologies import Asynchronous, StaleSynchronous, Star, Synchronous


def test_workers_get_the_mean_and_the_server_ends_with_them(serve: Callable[..., ServerProcess]) -> None:
    host = serve(2)

    def work(i: int) -> Tensor:
        server = join(host, i)
        for step in range(5):
            found = push(server, torch.full((N,), float(step + 10 * i)))
        server.close()
        return found

    first, second = each(lambda: work(0), lambda: work(1))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.full((N,), 9.0))
    host.thread.join(10)  # type: ignore[attr-defined]
    assert not host.thread.is_alive()  # type: ignore[attr-defined]


def test_asynchronous_workers_share_parameters(serve: Callable[..., ServerProcess]) -> None:
    host, star = serve(2), Star(Asynchronous())

    def work(i: int) -> Tensor:
        server = join(host, i, star=star)
        x = server.enter(torch.full((N,), 1.0), "a/0", BACK)
        assert (x >= 1).all(), "what the first has brought, and what has come since"
        for _ in range(20):
            push(server, torch.ones(N))
        meet = server.post(PushPull((), (), (BACK,), do="meet"), "a/0")
        assert meet.done.wait(30)
        whole = meet.answer()[0][0].clone()
        server.close()
        return whole

    first, second = each(lambda: work(0), lambda: work(1))
    assert torch.equal(first, second)
    assert torch.allclose(first, torch.full((N,), 1.0 + 20))


def refusal(host: ServerProcess, **about: Any) -> Exception:
    with pytest.raises(AttachError) as told:
        join(host, about.pop("worker", 0), **about)
    return told.value


def test_another_model_is_refused_naming_the_first_parameter_that_differs(
    serve: Callable[..., ServerProcess],
) -> None:
    host = serve(2)
    model = (("fc.weight", (5, 4), "float32", None), ("fc.bias", (5,), "float32", None))
    join(host, 0, model=model)
    other = (("fc.weight", (5, 4), "float32", None), ("fc.bias", (6,), "float32", None))
    says = "its parameter fc.bias of shape (6,) and float32 is the server's parameter fc.bias of shape (5,)"
    assert f"worker 1 has another model: {says}" in str(refusal(host, worker=1, model=other))
    assert "its end of the parameters is the server's parameter fc.bias" in str(
        refusal(host, worker=1, model=model[:1])
    )


def test_another_strategy_number_or_place_is_refused(serve: Callable[..., ServerProcess]) -> None:
    host = serve(2)
    join(host, 0)
    assert "attaches Star(" in str(refusal(host, worker=1, star=Star(Asynchronous())))
    assert "start it with --workers 3" in str(refusal(host, worker=1, workers=3))
    assert "in the same order everywhere" in str(refusal(host, worker=1, number=1))


def test_a_second_session_of_a_process_is_refused_and_the_first_goes_on(
    serve: Callable[..., ServerProcess],
) -> None:
    host = serve(2)
    mine, theirs = join(host, 0), join(host, 1)
    says = "rank 0 has a session with these servers already.*close that session first"
    for other in ({}, {"model": (*MODEL, ("b", (1,), "float32", None))}):
        with pytest.raises(AttachError, match=says):
            join(host, 0, **other)
    found = each(*(lambda server=server: push(server, torch.ones(N)) for server in (mine, theirs)))
    assert all(isinstance(x, Tensor) and torch.equal(x, torch.ones(N)) for x in found)
    mine.close()
    join(host, 0)


def test_a_port_in_use_is_named(serve: Callable[..., ServerProcess]) -> None:
    host = serve(2)
    with pytest.raises(
        ConfigError, match=rf"port {host.port} of 127\.0\.0\.1 cannot be opened, perhaps another"
    ):
        ServerProcess(2, host.port, secret=SECRET)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerLost, match=r"server 0 \(127.0.0.1:9\) cannot be reached"):
        ServerClient(
            0, ("127.0.0.1", 9), AxisRank(0, 1), timedelta(seconds=-3), RunSpec(Star(), (), MODEL), SECRET
        )


@pytest.mark.parametrize("text", ["", "here", "here:", ":5", "here:99999", "here:x"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    if text == "":
        assert addresses(text) == []
        return
    with pytest.raises(ConfigError, match="write host:port"):
        addresses(text)


def test_a_push_of_the_wrong_step_is_refused(serve: Callable[..., ServerProcess]) -> None:
    host = serve(1)
    server = join(host, 0, 1, Star(Asynchronous()))
    server.enter(torch.zeros(N), "a/0", BACK)
    push(server, torch.ones(N))
    server._clocks["a/0"] = 5
    with pytest.raises(PayloadError, match="has pushed step 6, and its next is step 2"):
        push(server, torch.ones(N))


def test_a_compressor_of_the_users_own_is_refused(serve: Callable[..., ServerProcess]) -> None:
    class Mine(Dense):
        pass

    Mine.__qualname__, Mine.__module__ = "Mine", __name__
    globals()["Mine"] = Mine
    host = serve(1)
    server = join(host, 0, 1, seconds=5)
    piece = PayloadSpec(Mine(), N, torch.float32)
    asked = server.post(PushPull(((torch.ones(N),),), (piece,), (BACK,)), "a/0")
    assert asked.done.wait(30)
    with pytest.raises(
        PayloadError, match=r"Mine is none of them: use one of tacit.compressors, or start .* with --import"
    ):
        asked.answer()


@pytest.mark.parametrize("star", [Star(), Star(StaleSynchronous(0))], ids=str)
def test_a_worker_that_is_silent_is_named_or_left_behind(
    serve: Callable[..., ServerProcess], star: Star
) -> None:
    host = serve(2, timeout=1.5)
    servers = [join(host, i, star=star) for i in range(2)]
    if star.independent:
        each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in servers])
        assert torch.allclose(push(servers[0], torch.ones(N)), torch.full((N,), 0.5))
        with pytest.raises(ServerLost, match=r"rank 1 was silent for 1\.5 s while others waited"):
            push(servers[1], torch.ones(N))
        return
    with pytest.raises(PeerLost, match=r"rank 1 was silent for 1\.5 s while others waited for it, though"):
        push(servers[0], torch.ones(N))


def test_of_several_that_are_silent_the_one_that_does_not_answer_is_named(
    serve: Callable[..., ServerProcess],
) -> None:
    host = serve(3, timeout=1.5)
    servers = [join(host, i, 3) for i in range(3)]
    servers[2]._channel.send = lambda header, body=(): None  # type: ignore[method-assign]  # as if stopped
    with pytest.raises(PeerLost, match=r"rank 2 was silent for 1\.5 s while others waited for it: gone or"):
        push(servers[0], torch.ones(N))


def test_a_restarted_server_goes_on(
    serve: Callable[..., ServerProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, star = tmp_path / "server.pt", Star(Asynchronous())
    host = serve(1, file)
    server = join(host, 0, 1, star)
    server.enter(torch.zeros(N), "a/0", BACK)
    for _ in range(3):
        found = push(server, torch.ones(N))
    server.close()
    host.thread.join(10)  # type: ignore[attr-defined]
    again = serve(1, file)
    server = join(again, 0, 1, star)
    assert torch.equal(server.enter(torch.zeros(N), "a/0", BACK), found)
    assert torch.equal(push(server, torch.ones(N)), found + 1)
    monkeypatch.setattr("tacit.stores.client.server_connection._PROCESS", "another")
    with pytest.raises(AttachError, match="has another model"):
        join(again, 0, 1, star, model=(("b", (N,), "float32", None),))


def test_a_restarted_server_that_averages_goes_on_too(
    serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    file = tmp_path / "server.pt"
    pull = PayloadSpec(Sign(), N, torch.float32, has_feedback=True)

    def session(x: Tensor) -> Tensor:
        host = serve(1, file)
        server = join(host, 0, 1)
        asked = server.post(PushPull(((x,),), (PIECE,), (pull,)), "a/0")
        assert asked.done.wait(30)
        out = torch.empty(N)
        Sign().decode_(asked.answer()[0], out)
        server.close()
        host.thread.join(10)  # type: ignore[attr-defined]
        return out

    x = torch.linspace(-1, 2, N)
    first, second = session(x), session(x)
    new_residual = x - first
    expected = torch.empty(N)
    sign = Sign()
    sign.decode_(
        sign.encode(x + new_residual, Context(out=x.clone(), work=BufferWorkspace(), peers=1)), expected
    )
    assert torch.allclose(second, expected, atol=1e-6), "what the first answer did not say is in the second"


def test_a_full_disk_is_told_once_and_the_old_checkpoint_stays(
    serve: Callable[..., ServerProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = tmp_path / "server.pt"
    file.write_bytes(b"")
    file.unlink()
    host = serve(1, file, every=0.0)
    server = join(host, 0, 1, Star(Asynchronous()))
    server.enter(torch.zeros(N), "a/0", BACK)
    push(server, torch.ones(N))
    deadline = time.monotonic() + 20
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    time.sleep(0.5)
    old = file.read_bytes()
    for _ in range(5):
        push(server, torch.ones(N))
        time.sleep(0.1)
    assert file.read_bytes() == old
    assert [each.message for each in caplog.records] == [
        f"the checkpoint {file} cannot be written, and stays as it was; training goes on: "
        "No space left on device"
    ]
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("how", ["other", "half", "folder"])
def test_what_is_no_checkpoint_is_refused(
    serve: Callable[..., ServerProcess], tmp_path: Path, how: str
) -> None:
    file = tmp_path / "server.pt"
    match how:
        case "other":
            file.write_text("hello")
        case "half":
            kept(serve, file)
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "folder":
            file.mkdir()
    folder = r"cannot write --checkpoint .*server\.pt: it is a folder"
    other = r"server\.pt is no checkpoint of a server .* move it away"
    with pytest.raises(ConfigError, match=folder if how == "folder" else other):
        ServerProcess(1, 0, secret=SECRET, checkpoint=(file, 30.0))


def test_lots_that_differ_are_refused(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    star, half = Star(Asynchronous()), PayloadSpec(None, N // 2, torch.float32)
    for again in (False, True):
        host = serve(1 if again else 2, tmp_path / "server.pt" if again else None)
        if again:
            first = join(host, 0, 1, star)
            first.enter(torch.zeros(N), "a/0", BACK)
            first.close()
            host.thread.join(10)  # type: ignore[attr-defined]
            host = serve(1, tmp_path / "server.pt")
            second = join(host, 0, 1, star)
        else:
            join(host, 0, 2, star).enter(torch.zeros(N), "a/0", BACK)
            second = join(host, 1, 2, star)
        with pytest.raises(AttachError, match=r"has 500 entries in the bucket of a/0, and the server 1000"):
            second.enter(torch.zeros(N // 2), "a/0", half)


def test_what_is_owed_of_other_lots_is_refused(serve: Callable[..., ServerProcess], tmp_path: Path) -> None:
    for n in (N, N // 2):
        host = serve(1, tmp_path / "server.pt")
        server = join(host, 0, 1)
        piece, pull = (
            PayloadSpec(Dense(), n, torch.float32),
            PayloadSpec(Sign(), n, torch.float32, has_feedback=True),
        )
        asked = server.post(PushPull(((torch.ones(n),),), (piece,), (pull,)), "a/0")
        assert asked.done.wait(30)
        if n == N:
            asked.answer()
            server.close()
            host.thread.join(10)  # type: ignore[attr-defined]
    with pytest.raises(PayloadError, match=r"the bucket of a/0 has 500 entries, and the --checkpoint 1000"):
        asked.answer()


def kept(serve: Callable[..., ServerProcess], file: Path) -> None:
    """Leave a checkpoint of one worker there."""
    host = serve(1, file)
    server = join(host, 0, 1, Star(Asynchronous()))
    server.enter(torch.zeros(N), "a/0", BACK)
    server.close()
    host.thread.join(10)  # type: ignore[attr-defined]


def test_a_checkpoint_of_other_workers_or_in_no_folder_is_refused(
    serve: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    kept(serve, tmp_path / "server.pt")
    with pytest.raises(ConfigError, match=r"is of a run of 1 workers, and there are 2: run 1, or give"):
        ServerProcess(2, 0, secret=SECRET, checkpoint=(tmp_path / "server.pt", 30.0))
    with pytest.raises(ConfigError, match=r"as there is no folder .*nowhere: make it"):
        ServerProcess(1, 0, secret=SECRET, checkpoint=(tmp_path / "nowhere" / "server.pt", 30.0))


def test_backup_workers_do_not_wait(serve: Callable[..., ServerProcess]) -> None:
    host, star = serve(2), Star(Synchronous(backup_workers=1))
    servers = [join(host, i, star=star) for i in range(2)]
    each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in servers])
    for step in range(3):
        assert torch.equal(push(servers[0], torch.ones(N)), torch.full((N,), step + 1.0))
    assert torch.equal(push(servers[1], torch.ones(N)), torch.full((N,), 3.0)), "late: dropped"
    assert host.stats()["late"] == 1


def test_what_counts_in_a_round_is_what_was_pushed(serve: Callable[..., ServerProcess]) -> None:
    """Who is behind is answered at once, and what it pushes next comes into the same memory."""
    host, star = serve(3), Star(Synchronous(backup_workers=1))
    servers = [join(host, i, 3, star) for i in range(3)]
    each(*[lambda s=s: s.enter(torch.zeros(N), "a/0", BACK) for s in servers])
    for _ in range(4):
        each(*[lambda s=s: push(s, torch.ones(N)) for s in servers[:2]])
    for x in (3.0, 1.0, 5.0):  # the first is late, the second counts, and the third is one too many
        push(servers[2], torch.full((N,), x))
    assert torch.equal(push(servers[0], torch.ones(N)), torch.full((N,), 4 + 1.0))


# ---- a server that is busy, or has a fault of its own --------------------------------------------------


def test_a_worker_that_has_said_who_it_is_may_wait_for_a_busy_server(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.stores.server.liveness._HELLO_SECONDS", 0.3)
    host, star = serve(2), Star(Asynchronous())
    first = join(host, 0, star=star)
    first.enter(torch.zeros(N), "a/0", BACK)
    busy, take = threading.Event(), host._take

    def slowly(event: Arrival) -> None:
        if event.header.kind == FrameKind.PUSH:
            busy.set()
            time.sleep(1.0)
        take(event)

    def come() -> ServerClient:
        assert busy.wait(20)
        return join(host, 1, star=star)

    monkeypatch.setattr(host, "_take", slowly)
    _, second = each(lambda: push(first, torch.ones(N)), come)
    assert isinstance(second, ServerClient), second


def test_a_failure_to_copy_the_state_does_not_end_the_server(
    serve: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = serve(1)

    def fails(state: object, last: bool = False) -> None:
        if not last:
            raise RuntimeError("no memory for a copy")

    monkeypatch.setattr(host._checkpoint, "save", fails)
    server = join(host, 0, 1)
    for _ in range(3):
        assert torch.equal(push(server, torch.ones(N)), torch.ones(N))
    server.close()
    host.thread.join(10)  # type: ignore[attr-defined]
    assert not host.thread.is_alive()  # type: ignore[attr-defined]
    assert "RuntimeError: no memory for a copy" in caplog.records[0].message
