from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]

MARK = "TACIT_TEST_MARK"


def marked(mark: str) -> dict[int, str]:
    """Live processes with the mark in their environment, and their network namespaces."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = os.readlink(entry / "ns/net")
    return found


def networks() -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry / "ns/net"))
    return found


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def gone(mark: str, used: set[str]) -> bool:
    """Whether all is gone; killed processes take a moment."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not marked(mark) and not used & networks():
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def command(cluster: str, program: Path, how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, str(program.with_name("command.py")), cluster, str(program), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {MARK: mark},
    ) as process:
        try:
            yield process, mark
        finally:
            process.kill()


def scratch() -> set[str]:
    return {path.name for path in Path("/tmp").glob("torchelastic_*")}


@pytest.mark.parametrize("cluster", ["2x1@100mbit", "local:2"])
@pytest.mark.parametrize("end", ["success", "error", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(programs: Path, cluster: str, end: str) -> None:
    before, folders = interfaces(), scratch()
    how = "hang" if end.startswith("SIG") else end
    with command(cluster, programs / "linger.py", how) as (process, mark):
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        seen = marked(mark)
        used = set(seen.values()) - {os.readlink("/proc/self/ns/net")}
        assert len(used) == (0 if cluster.startswith("local") else 3) or end != "success"
        if how == "hang":
            assert len(seen) >= 2 + 2 + 2 + 2  # command, supervisor, keepers, ranks, orphans
            process.send_signal(signal.Signals[end])
        code = process.wait(30)
    assert (code == 0) == (end == "success")
    assert gone(mark, used), marked(mark)
    assert interfaces() == before
    assert scratch() <= folders


def test_the_supervisor_is_killed(programs: Path) -> None:
    with command("2x1", programs / "linger.py", "hang") as (process, mark):
        assert process.stdout is not None
        process.stdout.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        assert process.wait(30) != 0, children
        assert gone(mark, set())


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found
