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


def networks() -> dict[int, str]:
    """The network namespace of every process."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = os.readlink(entry / "ns/net")
    return found


def marked(mark: str) -> set[int]:
    """Live processes with the mark in their environment."""
    found = set()
    for process in networks():
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{process}/environ").read_bytes():
                found.add(process)
    return found


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def gone(mark: str, holders: set[tuple[int, str]]) -> bool:
    """Whether all is gone; killed processes take a moment."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if not marked(mark) and not holders & set(networks().items()):
            return True
        time.sleep(0.05)
    return False


@contextlib.contextmanager
def command(
    cluster: str, program: Path, how: str, scratch: Path
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, str(program.with_name("command.py")), cluster, str(program), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {MARK: mark, "TMPDIR": str(scratch)},
        # Whoever runs the tests in the background of a shell has had SIGINT ignored, which is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process, mark
        finally:
            process.kill()


LOADED = "nodes=[1x1@100mbit,1x1@10mbit+load=5mbit]"
LATE = "2x1@100mbit,5ms"


@pytest.mark.parametrize(
    ("cluster", "end"),
    [
        *((cluster, end) for cluster in ("2x1@100mbit", "local:2") for end in ("success", "error")),
        *(
            (cluster, end)
            for cluster in ("2x1@100mbit", "local:2")
            for end in ("SIGINT", "SIGTERM", "SIGKILL")
        ),
        *((LOADED, end) for end in ("success", "SIGKILL")),
        *((LATE, end) for end in ("error", "SIGINT")),
    ],
)
def test_nothing_is_left(programs: Path, tmp_path: Path, cluster: str, end: str) -> None:
    before = interfaces()
    how = "hang" if end.startswith("SIG") else end
    with command(cluster, programs / "linger.py", how, tmp_path) as (process, mark):
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "up\n"
        own = os.readlink("/proc/self/ns/net")
        processes = marked(mark)
        used = {network for number, network in networks().items() if number in processes} - {own}
        holders = {item for item in networks().items() if item[1] in used}
        if how == "hang":
            # Command, supervisor, keepers, ranks, orphans, and a load.
            assert len(processes) >= 2 + 2 + 2 + 2 + (cluster == LOADED)
            assert len(used) == (0 if cluster.startswith("local") else 3)  # the switch, and each node
            process.send_signal(signal.Signals[end])
        code = process.wait(30)
    assert (code == 0) == (end == "success")
    assert gone(mark, holders), marked(mark)
    assert interfaces() == before
    assert list(tmp_path.iterdir()) == []


def test_the_supervisor_is_killed(programs: Path, tmp_path: Path) -> None:
    with command("2x1", programs / "linger.py", "hang", tmp_path) as (process, mark):
        assert process.stdout is not None
        process.stdout.readline()
        for child in _children(process.pid):
            os.kill(child, signal.SIGKILL)
        assert process.wait(30) != 0
        assert gone(mark, set())


def _children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
    return found
