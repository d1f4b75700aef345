from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from forked_testbeds import forked_testbeds
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Result, Testbed

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]


def run(program: Path, *arguments: str, timeout: float = 90) -> tuple[Result, list[str]]:
    lines: list[str] = []
    with Testbed(Cluster.parse("2x2")) as testbed:
        argv = [str(program), *arguments]
        result = testbed.run(argv, on_line=lambda _, line: lines.append(line), timeout=timeout)
    return result, lines


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill", "killed by SIGKILL"),
        ("kill-keeper", "killed by SIGKILL"),
        ("raise", "exit code 1"),
        ("raise-and-linger", "exit code 1"),
        ("exit", "exit code 7"),
    ],
)
def test_the_rank_that_failed_first_is_named(programs: Path, how: str, reason: str) -> None:
    with nullcontext() if how == "kill-keeper" else forked_testbeds(fresh=(2,)):  # once as users have it
        result, lines = run(programs / "fail.py", how)
    first = result.failures[0]
    assert (first.node, first.rank, first.reason) == (1, 2, reason), (result, lines)
    assert result.returncode == 1
    assert not result.timed_out
    assert len(result.failures) <= 2
    assert not any("\x1e" in line for line in lines)
    if how.startswith("raise"):
        assert first.traceback is not None
        assert first.traceback.startswith("Traceback (most recent call last):\n")
        assert first.traceback.endswith("\nValueError: rank two\nhas had enough")
        assert any("has had enough" in line for line in lines)


def test_a_run_that_hangs_is_ended_at_its_time_limit(programs: Path) -> None:
    result, _ = run(programs / "linger.py", "hang", timeout=6)
    assert result.timed_out
    assert result.returncode == 124
    assert result.failures == ()
    assert 6 <= result.seconds < 60  # the program itself hangs for ever


def test_nodes_that_do_not_fail_are_stopped(programs: Path, tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '3': sys.exit(3)\ntime.sleep(1000)\n")
    with forked_testbeds():
        result, lines = run(script)
    assert [(f.node, f.rank, f.reason) for f in result.failures] == [(1, 3, "exit code 3")], (result, lines)
    assert result.seconds < 100  # and not the thousand of the others


def test_a_stopped_rank_that_nobody_waits_for_ends_the_run(tmp_path: Path) -> None:
    """As with servers that go on without it: all others end well, and the launcher would wait for ever."""
    script = tmp_path / "x.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGSTOP)")
    with Testbed(Cluster.parse("local:2")) as testbed:
        result = testbed.run([str(script)], on_line=lambda *_: None)
    assert result.returncode != 0
    assert str(result.failures[0]) == "rank 1 froze: it was stopped, and answered nobody (node 0)"


def test_the_launcher_itself_fails(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Testbed(Cluster.parse("1x1")) as testbed:
        monkeypatch.setattr("sys.executable", "/no/such/python")
        result = testbed.run(["x.py"], on_line=lambda *_: None)
    (failure,) = result.failures
    assert (failure.rank, result.returncode) == (None, 127)
    assert "cannot start /no/such/python" in str(failure.traceback)
    assert str(failure) == "the launcher of node 0 ended with exit code 127"
