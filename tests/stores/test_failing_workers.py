"""Real workers and servers over Gloo, of which some go wrong."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from worker_processes import WorkerProcesses

WORLD = 3


def test_synchronous_workers_are_told_whose_gradient_is_not_finite() -> None:
    with WorkerProcesses() as processes:
        address, _ = processes.server(WORLD)
        workers = [
            processes.worker(WORLD, rank, "faulty", "ps", "nan", TACIT_SERVERS=address)
            for rank in range(WORLD)
        ]
        for each in workers:
            ended = processes.ended(each)
            assert ended.code == 1, ended.text
            said = ended.said[-1]
            assert said["kind"] == "NonFinite"
            assert "NaN or infinity in the gradient of 3.bias on rank 1, in step 5" in str(said["says"])


@pytest.mark.parametrize(
    "algorithm",
    ["ps-async", "ps-ssp", "ps:backup_workers=1", "ps-async:optimizer=server", "ps-ssp:push=topk"],
)
def test_a_worker_whose_step_is_not_finite_says_where_and_the_others_go_on(algorithm: str) -> None:
    with WorkerProcesses() as processes:
        address, _ = processes.server(WORLD)
        workers = [
            processes.worker(WORLD, rank, "faulty", algorithm, "nan", TACIT_SERVERS=address)
            for rank in range(WORLD)
        ]
        ended = [processes.ended(each) for each in workers]
        assert [each.code for each in ended] == [0, 1, 0], "\n".join(each.text for each in ended)
        what = "gradient of" if "server" in algorithm else "parameter"
        says = f"NaN or infinity in the {what} 3.bias on rank 1, in step 5: "
        assert ended[1].said[-1]["kind"] == "NonFinite", ended[1].said[-1]
        assert str(ended[1].said[-1]["says"]).startswith(says), ended[1].said[-1]


ENDS = ["early", "raises", "killed", "frozen"]
ALGORITHMS = ["ps", "ps:optimizer=server", "ps:backup_workers=1", "ps-async", "ps-ssp:bound=1"]
TIMEOUT = 8
"""Of the workers; the server follows it."""


MORE = [
    ("ps-ssp:bound=0", "exits"),
    ("lowbit", "killed"),
    ("lowbit:bound=0", "killed"),
    ("lowbit:bound=1", "early"),
]


@pytest.mark.parametrize(("algorithm", "how"), [*product(ALGORITHMS, ENDS), *MORE])
def test_however_a_worker_ends_all_end_in_time(algorithm: str, how: str) -> None:
    """Where all wait for all, by an error that names it; elsewhere the others train to the end."""
    with WorkerProcesses() as processes:
        address, server = processes.server(WORLD)
        workers = [
            processes.worker(WORLD, rank, "faulty", algorithm, how, TACIT_SERVERS=address)
            for rank in range(WORLD)
        ]
        ended = [processes.ended(workers[rank]) for rank in (0, 2)]
        for each in ended:
            assert float(str(each.said[-1]["seconds"])) < 4 * TIMEOUT, each.said
        in_step = algorithm in ("ps", "lowbit") or (algorithm == "ps:optimizer=server" and how != "early")
        if in_step:
            assert [each.code for each in ended] == [1, 1], ended[0].text + ended[1].text
            assert all("rank 1" in str(each.said[-1]["says"]) for each in ended), [
                each.said for each in ended
            ]
        else:
            assert [each.code for each in ended] == [0, 0], ended[0].text + ended[1].text
            assert ended[0].said[-1]["total"] == ended[1].said[-1]["total"]
        if how == "frozen":
            return  # what becomes of it, nobody waits to see
        (code,) = [processes.ended(workers[1]).code]
        assert code == {"killed": -9, "exits": 3, "raises": 1, "early": 1 if in_step else 0}[how]
        assert server.wait(4 * TIMEOUT) == 0


@pytest.mark.parametrize("algorithm", ["ps", "ps-async"])
def test_when_a_server_is_killed_every_worker_says_so(algorithm: str) -> None:
    with WorkerProcesses() as processes:
        servers = [processes.server(WORLD, number=i) for i in range(2)]
        told = ",".join(address for address, _ in servers)
        workers = [
            processes.worker(WORLD, rank, "faulty", algorithm, "server", TACIT_SERVERS=told)
            for rank in range(WORLD)
        ]
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if line.startswith("{"):
                break
        servers[1][1].kill()
        for worker in workers:
            ended = processes.ended(worker)
            assert ended.code == 1, ended.text
            said = ended.said[-1]
            assert said["kind"] == "ServerLost", said
            assert str(said["says"]).startswith("server 1 (127.0.0.1:"), said


@pytest.mark.parametrize("algorithm", ["ps-async", "lowbit:bound=0"])
def test_a_killed_worker_comes_back_and_no_update_is_lost_or_counted_twice(
    algorithm: str, tmp_path: Path
) -> None:
    file = tmp_path / "server.pt"
    with WorkerProcesses() as processes:
        address, _ = processes.server(2, "--timeout", "20", "--checkpoint", str(file))
        back = tmp_path / "back"
        steady = processes.alone(0, 2, "counts", "1", "0.1", str(back), algorithm, TACIT_SERVERS=address)
        first = processes.alone(1, 2, "counts", "1000", "0.05", "", algorithm, TACIT_SERVERS=address)
        assert first.stdout is not None
        for _ in ("began", "at 3"):
            first.stdout.readline()
        first.kill()
        again = processes.alone(1, 2, "counts", "5", "0.01", "", algorithm, TACIT_SERVERS=address)
        assert again.stdout is not None
        began = json.loads(again.stdout.readline())["began"]
        back.touch()
        ended = [processes.ended(each) for each in (steady, again)]
        assert [each.code for each in ended] == [0, 0], "\n".join(each.text for each in ended)
        assert began >= 1, "it begins with fresh parameters"
        final = {each.said[-1]["ended"] for each in ended}
        assert len(final) == 1
        (served,) = ended[1].said[-2]["servers"]  # type: ignore[misc]
        assert sum(served["stale"].values()) == served["pushes"]  # type: ignore[index]


def test_a_disk_that_is_full_is_told_once_and_training_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "server.pt"
    with WorkerProcesses() as processes:
        address, server = processes.server(1, "--checkpoint", str(file), "--every", "0.05")
        worker = processes.alone(0, 1, "counts", "150", "0.02", TACIT_SERVERS=address)
        assert worker.stdout is not None
        worker.stdout.readline()
        until(file.exists)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        until(lambda: not [*tmp_path.glob("*.part")])  # one may have been written before
        old = file.read_bytes()
        done, told = processes.ended(worker), processes.ended(server)
        assert (done.code, told.code) == (0, 0), done.text + told.text
        assert done.said[-1]["ended"] == 150.0
        assert (
            told.text.count("cannot be written, and stays as it was; training goes on: File too large") == 1
        )
        assert file.read_bytes() == old
        assert [*tmp_path.iterdir()] == [file]
        _, again = processes.server(1, "--checkpoint", str(file))
        assert again.stdout is not None
        assert again.stdout.readline() == f"tacit.stores.server: server 0 goes on from {file}\n"


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_server_that_is_asked_to_end_saves_first(tmp_path: Path) -> None:
    file = tmp_path / "server.pt"
    with WorkerProcesses() as processes:
        address, server = processes.server(1, "--checkpoint", str(file))
        worker = processes.alone(0, 1, "counts", "100000", "0.02", TACIT_SERVERS=address)
        assert worker.stdout is not None
        for _ in ("began", "at 3"):
            worker.stdout.readline()
        server.terminate()
        assert processes.ended(server).code == 0
        worker.kill()
        kept = file.read_bytes()
        _, idle = processes.server(1, "--checkpoint", str(file))
        assert idle.stdout is not None
        assert "goes on from" in idle.stdout.readline()
        idle.terminate()
        assert processes.ended(idle).code == 0
        assert len(file.read_bytes()) == len(kept), "one that no worker came to keeps all"
        address, _ = processes.server(1, "--checkpoint", str(file))
        again = processes.ended(processes.alone(0, 1, "counts", "1", "0", TACIT_SERVERS=address))
    assert again.code == 0, again.text
    began = float(str(again.said[0]["began"]))
    assert began >= 2
    assert again.said[-1]["ended"] == began + 1


def test_without_a_server_it_is_said_what_to_write() -> None:
    with WorkerProcesses() as processes:
        ended = processes.ended(processes.worker(1, 0, "faulty", "ps", "none"))
    assert ended.code == 1
    assert "'ps' needs a parameter server, and there is none: run with --servers 1" in ended.text


def test_more_servers_than_parameters_are_refused() -> None:
    with WorkerProcesses() as processes:
        told = ",".join(f"127.0.0.1:{port}" for port in range(2000, 2007))
        ended = processes.ended(processes.worker(1, 0, "faulty", "ps", "none", TACIT_SERVERS=told))
    assert ended.code == 1
    assert "7 servers cannot share a model of 4 parameters" in ended.text
