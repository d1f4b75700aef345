"""A compressor that is not tacit's own, in real workers and a real server: `--import my_codecs`."""

from __future__ import annotations

import pytest
from worker_processes import WorkerProcesses

WORLD = 2


def ran(how: str, *options: str) -> tuple[list[dict[str, object]], str]:
    """What each worker says in the end, and what the server has said."""
    with WorkerProcesses() as processes:
        address, server = processes.server(WORLD, *options)
        workers = [
            processes.worker(WORLD, rank, how, script="my_training.py", TACIT_SERVERS=address)
            for rank in range(WORLD)
        ]
        ended = [processes.ended(worker) for worker in workers]
        server.terminate()
        assert all(each.said for each in ended), ended
        return [each.said[-1] for each in ended], processes.ended(server, 60).text


@pytest.mark.parametrize("how", ["averages", "keeps"])
def test_a_compressor_that_the_server_imports_is_used_by_workers_and_server(how: str) -> None:
    said, server = ran(how, "--import", "my_codecs")
    assert all("pushed" in each for each in said), (said, server)
    assert said[0]["sum"] == said[1]["sum"], "all end with the same parameters"
    for each in said:
        assert each["pushed"] < 8 * 150, "a byte for each of 100 entries, or a row of 20, in 8 steps"  # type: ignore[operator]
        assert each["moved"] > 0.1  # type: ignore[operator]


def test_without_it_workers_are_told_what_to_write() -> None:
    said, _ = ran("averages")
    assert len(said) == WORLD
    for each in said:
        assert "my_codecs.FirstRows is none of them: use one of tacit.compressors" in str(each["says"])
        assert "start the server with --import" in str(each["says"])
        assert "server 0 (127.0.0.1:" in str(each["says"])
        assert "has refused a message: a parameter server can read only" in str(each["says"])
        assert "network" not in str(each["says"]), "no link is to blame"


def test_a_module_that_cannot_be_imported_ends_the_server_with_a_sentence() -> None:
    with WorkerProcesses() as processes:
        _, server = processes.server(1, "--import", "no_such_codecs")
        ended = processes.ended(server)
    assert ended.code == 2
    assert ended.text.startswith("tacit.stores.server: --import no_such_codecs cannot be imported")
