"""How long parameter servers have to end once all ranks have, with a supervisor that is a thread."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pytest

from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Result, Testbed, running, wire
from tacit_lab.testbed.launch import Serving
from tacit_lab.testbed.running import RunMonitor

RANKS, SERVER = 0, 1


class Supervised:
    """One node of ranks, which ends at once, and one server.

    Args:
        after: seconds that the server goes on; `heeds`: whether SIGTERM ends it.
    """

    def __init__(self, control: socket.socket, after: float, heeds: bool) -> None:
        self._control, self._after, self._heeds = control, after, heeds
        self._lock, self._over = threading.Lock(), False
        self.did: list[str] = []

    def run(self) -> None:
        wire.send(self._control, {"ended": RANKS, "code": 0})
        timer = threading.Timer(self._after, lambda: self._end(0))
        timer.start()
        while (received := wire.receive(self._control)) is not None:
            message, _ = received
            self.did.append(message["do"])
            if message["do"] == "sweep":
                timer.cancel()
                self._end(-signal.SIGKILL)
                wire.send(self._control, {"swept": True})
                return
            assert (message["node"], message["signal"]) == (SERVER, signal.SIGTERM)
            if self._heeds:
                self._end(0)

    def _end(self, code: int) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                wire.send(self._control, {"ended": SERVER, "code": code})


NEVER = 3600.0


def followed(
    monkeypatch: pytest.MonkeyPatch,
    after: float,
    dismissal: float,
    saving: float,
    saves: bool,
    heeds: bool = False,
) -> tuple[Result, list[str]]:
    """What came of it, and what the supervisor was told to do."""
    monkeypatch.setattr(running, "DISMISSAL", dismissal)
    monkeypatch.setattr(running, "SAVING", saving)
    monkeypatch.setattr(running, "TERMINATION", 0.2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        supervised = Supervised(theirs, after, heeds)
        thread = threading.Thread(target=supervised.run)
        thread.start()
        run = RunMonitor(ours, 1, lambda *_: None, None, servers=1, saving=saves)
        result = run.follow()
        thread.join(10)
        run.close()
    return result, supervised.did


def test_a_server_has_the_time_to_write_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    result, did = followed(monkeypatch, after=0.5, dismissal=0.1, saving=NEVER, saves=True)
    assert result.ok
    assert did == ["sweep"], "nobody has told it to end"


def test_one_that_still_writes_then_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    result, did = followed(monkeypatch, after=NEVER, dismissal=NEVER, saving=0.1, saves=True)
    assert did == ["signal", "sweep"]
    assert result.returncode == -signal.SIGKILL
    assert [str(each) for each in result.failures] == ["parameter server 0 was killed by SIGKILL"]


def test_one_that_waits_for_workers_saves_and_ends_when_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result, did = followed(monkeypatch, after=NEVER, dismissal=NEVER, saving=0.1, saves=True, heeds=True)
    assert did == ["signal", "sweep"]
    assert result.ok


@pytest.mark.parametrize("heeds", [True, False])
def test_without_a_checkpoint_a_server_is_dismissed_soon_and_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    result, did = followed(monkeypatch, after=NEVER, dismissal=0.1, saving=NEVER, saves=False, heeds=heeds)
    assert did == ["signal", "sweep"]
    assert result.ok


@pytest.mark.parametrize("checkpoint", [None, Path("kept")])
def test_a_run_knows_whether_its_servers_keep_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path | None
) -> None:
    given: dict[str, object] = {}

    def begin(*_: object, **options: object) -> None:
        given.update(options)
        raise KeyError("enough")

    monkeypatch.setattr("tacit_lab.testbed.testbed.RunMonitor", begin)
    with Testbed(Cluster.parse("local:1")) as testbed, pytest.raises(KeyError, match="enough"):
        testbed.run(["train.py"], servers=Serving(checkpoint=checkpoint))
    assert given["saving"] == (checkpoint is not None)
