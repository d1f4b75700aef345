"""Real workers and servers over Gloo, of which some go wrong."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from crowd import Crowd

WORLD = 3
SAYS = {
    ("ps", "killed"): "PeerLost: rank 1 (is gone|did not answer)",
    ("ps", "frozen"): "PeerLost: rank 1 (was silent for|did not answer)",
    ("ps", "nan"): "NonFinite: NaN or infinity in the gradient of .* on rank 1",
    ("ps:backup_workers=1", "nan"): "",
}


@pytest.mark.parametrize("how", ["killed", "frozen", "nan"])
def test_synchronous_workers_are_told_who_went_wrong(how: str) -> None:
    with Crowd() as crowd:
        address, _ = crowd.server(WORLD, "--timeout", "5")
        workers = [
            crowd.worker(WORLD, rank, "faulty", "ps", how, TACIT_SERVERS=address) for rank in range(WORLD)
        ]
        for rank in (0, 2):
            ended = crowd.ended(workers[rank])
            assert ended.code == 1, ended.text
            said = ended.said[-1]
            assert re.search(SAYS["ps", how], f"{said['kind']}: {said['says']}"), said
            assert float(str(said["seconds"])) < 40


@pytest.mark.parametrize("algorithm", ["ps-async", "ps-ssp:bound=1", "ps:backup_workers=1"])
@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_others_go_on_without_a_worker(algorithm: str, how: str) -> None:
    with Crowd() as crowd:
        address, _ = crowd.server(WORLD, "--timeout", "4")
        workers = [
            crowd.worker(WORLD, rank, "faulty", algorithm, how, TACIT_SERVERS=address)
            for rank in range(WORLD)
        ]
        totals = []
        for rank in (0, 2):
            ended = crowd.ended(workers[rank])
            assert ended.code == 0, ended.text
            totals.append(ended.said[-1]["total"])
        assert totals[0] == totals[1]


@pytest.mark.parametrize("algorithm", ["ps", "ps-async"])
def test_when_a_server_is_killed_every_worker_says_so(algorithm: str) -> None:
    with Crowd() as crowd:
        servers = [crowd.server(WORLD, number=i) for i in range(2)]
        told = ",".join(address for address, _ in servers)
        workers = [
            crowd.worker(WORLD, rank, "faulty", algorithm, "server", TACIT_SERVERS=told)
            for rank in range(WORLD)
        ]
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if line.startswith("{"):
                break
        servers[1][1].kill()
        for worker in workers:
            ended = crowd.ended(worker)
            assert ended.code == 1, ended.text
            said = ended.said[-1]
            assert said["kind"] == "ServerLost", said
            assert str(said["says"]).startswith("server 1 (127.0.0.1:"), said


def test_a_killed_worker_comes_back_and_no_update_is_lost_or_counted_twice(tmp_path: Path) -> None:
    file = tmp_path / "server.pt"
    with Crowd() as crowd:
        address, _ = crowd.server(2, "--timeout", "20", "--checkpoint", str(file))
        back = tmp_path / "back"
        steady = crowd.alone(0, 2, "counts", "1", "0.1", str(back), TACIT_SERVERS=address)
        first = crowd.alone(1, 2, "counts", "1000", "0.05", TACIT_SERVERS=address)
        assert first.stdout is not None
        for _ in ("began", "at 3"):
            first.stdout.readline()
        first.kill()
        again = crowd.alone(1, 2, "counts", "5", "0.01", TACIT_SERVERS=address)
        assert again.stdout is not None
        began = json.loads(again.stdout.readline())["began"]
        back.touch()
        ended = [crowd.ended(each) for each in (steady, again)]
        assert [each.code for each in ended] == [0, 0], "\n".join(each.text for each in ended)
        assert began >= 1, "it begins with fresh parameters"
        final = {each.said[-1]["ended"] for each in ended}
        assert len(final) == 1
        (served,) = ended[1].said[-2]["servers"]  # type: ignore[misc]
        assert sum(served["stale"].values()) == served["pushes"]  # type: ignore[index]


def test_a_disk_that_is_full_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "server.pt"
    with Crowd() as crowd:
        address, server = crowd.server(1, "--checkpoint", str(file), "--every", "0.05")
        worker = crowd.alone(0, 1, "counts", "150", "0.02", TACIT_SERVERS=address)
        assert worker.stdout is not None
        worker.stdout.readline()
        until(file.exists)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        until(lambda: not file.with_name("server.pt.part").exists())
        old = file.read_bytes()
        done, told = crowd.ended(worker), crowd.ended(server)
        assert (done.code, told.code) == (0, 0), done.text + told.text
        assert done.said[-1]["ended"] == 150.0
        assert (
            told.text.count("cannot be written, and stays as it was; training goes on: File too large") == 1
        )
        assert file.read_bytes() == old
        assert [*tmp_path.iterdir()] == [file]
        _, again = crowd.server(1, "--checkpoint", str(file))
        assert again.stdout is not None
        assert again.stdout.readline() == f"tacit.server: server 0 goes on from {file}\n"


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_server_that_is_asked_to_end_saves_first(tmp_path: Path) -> None:
    file = tmp_path / "server.pt"
    with Crowd() as crowd:
        address, server = crowd.server(1, "--checkpoint", str(file))
        worker = crowd.alone(0, 1, "counts", "100000", "0.02", TACIT_SERVERS=address)
        assert worker.stdout is not None
        for _ in ("began", "at 3"):
            worker.stdout.readline()
        server.terminate()
        assert crowd.ended(server).code == 0
        worker.kill()
        kept = file.read_bytes()
        _, idle = crowd.server(1, "--checkpoint", str(file))
        assert idle.stdout is not None
        assert "goes on from" in idle.stdout.readline()
        idle.terminate()
        assert crowd.ended(idle).code == 0
        assert len(file.read_bytes()) == len(kept), "one that no worker came to keeps all"
        address, _ = crowd.server(1, "--checkpoint", str(file))
        again = crowd.ended(crowd.alone(0, 1, "counts", "1", "0", TACIT_SERVERS=address))
    assert again.code == 0, again.text
    began = float(str(again.said[0]["began"]))
    assert began >= 2
    assert again.said[-1]["ended"] == began + 1


def test_without_a_server_it_is_said_what_to_write() -> None:
    with Crowd() as crowd:
        ended = crowd.ended(crowd.worker(1, 0, "faulty", "ps", "none"))
    assert ended.code == 1
    assert "'ps' needs a parameter server, and there is none: run with --servers 1" in ended.text


def test_more_servers_than_parameters_are_refused() -> None:
    with Crowd() as crowd:
        told = ",".join(f"127.0.0.1:{port}" for port in range(2000, 2007))
        ended = crowd.ended(crowd.worker(1, 0, "faulty", "ps", "none", TACIT_SERVERS=told))
    assert ended.code == 1
    assert "7 servers cannot share a model of 4 parameters" in ended.text
