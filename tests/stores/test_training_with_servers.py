"""Real workers and servers over Gloo that train as they should."""

from __future__ import annotations

from pathlib import Path

from worker_processes import WorkerProcesses

from rank_processes import Ended

WORLD = 3


def together(processes: WorkerProcesses, what: str, servers: list[int], *arguments: str) -> list[Ended]:
    """Three workers, and for each of their sessions so many servers."""
    made = [[processes.server(WORLD, number=i) for i in range(count)] for count in servers]
    told = ";".join(",".join(address for address, _ in group) for group in made)
    workers = [processes.worker(WORLD, rank, what, *arguments, GROUPS=told) for rank in range(WORLD)]
    ended = [processes.ended(worker) for worker in workers]
    failed = [f"rank {rank}:\n{each.text[-3000:]}" for rank, each in enumerate(ended) if each.code]
    assert not failed, "\n".join(
        failed
    )  # of all: who fails first is seen by the others as a closed connection
    for group in made:
        for _, process in group:
            assert process.wait(60) == 0, "a server outlives its workers"
    return ended


def assert_passed(ended: list[Ended], checks: int) -> None:
    for each in ended:
        assert [said for said in each.said if said["error"]] == []
        assert len(each.said) == checks


def test_with_servers_it_is_what_it_is_without() -> None:
    with WorkerProcesses() as processes:
        assert_passed(together(processes, "equal", [2, 1, 1, 2, 2, 1, 1, 1, 1, 1, 2, 1, 1]), 13)


def test_every_way_of_using_servers_trains_and_ends_equal() -> None:
    with WorkerProcesses() as processes:
        assert_passed(together(processes, "learns", [1] * 13), 13)


def test_what_stands_beside_the_parameters_is_averaged_where_a_server_steps() -> None:
    with WorkerProcesses() as processes:
        assert_passed(together(processes, "beside", [1, 2, 2, 1]), 4)


def test_a_server_steps_each_group_as_its_own() -> None:
    with WorkerProcesses() as processes:
        assert_passed(together(processes, "by_group", [1, 2, 1]), 3)


def test_a_run_that_is_resumed_goes_on(tmp_path: Path) -> None:
    with WorkerProcesses() as processes:
        assert_passed(together(processes, "resumed", [1, 1, 1, 1, 1, 2], str(tmp_path)), 2)
