"""A compressor that is not tacit's own, in real workers and a real server: `--import my_codecs`."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from forks import Fork
from tacit_lab.testbed.launch import free_port

HERE = Path(__file__).resolve().parent
WORLD = 2


def started(command: Sequence[str], **env: str) -> subprocess.Popen[str]:
    common = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return Fork([sys.executable, *command], **pipes, text=True, cwd=HERE, env=os.environ | common | env)


def ran(store: Path, how: str, *options: str) -> tuple[list[dict[str, object]], str]:
    """What each worker says in the end, and what the server has said."""
    port, secret = free_port(), secrets.token_hex(32)
    command = ["-m", "tacit.stores.server", "--workers", str(WORLD), "--port", str(port), *options]
    server = started(command, TACIT_SERVER_SECRET=secret)
    told = {"TACIT_SERVER_SECRET": secret, "TACIT_SERVERS": f"127.0.0.1:{port}"}
    workers = [
        started(["my_training.py", str(rank), str(WORLD), str(store), how], **told) for rank in range(WORLD)
    ]
    try:
        said = [worker.communicate(timeout=200)[0] for worker in workers]
        server.terminate()
        return [_last(text) for text in said], server.communicate(timeout=60)[0]
    finally:
        for process in (*workers, server):
            process.kill()
            process.communicate()


def _last(text: str) -> dict[str, object]:
    """What a worker says in the end."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    assert lines, text
    found: dict[str, object] = json.loads(lines[-1])
    return found


@pytest.mark.parametrize("how", ["averages", "keeps"])
def test_a_compressor_that_the_server_imports_is_used_by_workers_and_server(how: str, tmp_path: Path) -> None:
    said, server = ran(tmp_path / "store", how, "--import", "my_codecs")
    assert all("pushed" in each for each in said), (said, server)
    assert said[0]["sum"] == said[1]["sum"], "all end with the same parameters"
    for each in said:
        assert each["pushed"] < 8 * 150, "a byte for each of 100 entries, or a row of 20, in 8 steps"  # type: ignore[operator]
        assert each["moved"] > 0.1  # type: ignore[operator]


def test_without_it_workers_are_told_what_to_write(tmp_path: Path) -> None:
    said, _ = ran(tmp_path / "store", "averages")
    assert len(said) == WORLD
    for each in said:
        assert "my_codecs.FirstRows is none of them: use one of tacit.compressors" in str(each["says"])
        assert "start the server with --import" in str(each["says"])
        assert "server 0 (127.0.0.1:" in str(each["says"])
        assert "has refused a message: a parameter server can read only" in str(each["says"])
        assert "network" not in str(each["says"]), "no link is to blame"


def test_a_module_that_cannot_be_imported_ends_the_server_with_a_sentence() -> None:
    command = ["-m", "tacit.stores.server", "--workers", "1", "--port", "1", "--import", "no_such_codecs"]
    server = started(command, TACIT_SERVER_SECRET=secrets.token_hex(32))
    said, _ = server.communicate(timeout=60)
    assert server.returncode == 2
    assert said.startswith("tacit.stores.server: --import no_such_codecs cannot be imported")
