from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Failure, Result, launch, rank, supervisor, wire
from tacit_lab.testbed.failure_attribution import Node, reason
from tacit_lab.testbed.network import counters, namespaces, nodes


def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, tacit_lab.testbed; sys.exit('torch' in sys.modules or 'pyroute2' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counters_read_the_own_namespace() -> None:
    before = counters.transmitted("lo"), counters.received("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind(("127.0.0.1", 0))
        udp.sendto(bytes(1000), udp.getsockname())
    assert counters.transmitted("lo") - before[0] >= 1000
    assert counters.received("lo") - before[1] >= 1000
    with pytest.raises(TestbedError, match=r"'eth99', only .*lo.*TACIT_INTERFACE"):
        counters.transmitted("eth99")


def test_addresses_are_distinct() -> None:
    addresses = [nodes.address(node) for node in range(1000)]
    assert addresses[0] == "10.77.0.1"
    assert len(set(addresses)) == 1000
    assert "10.77.1.1 node256\n" in nodes.hosts(300)


def test_messages_of_any_size_and_files_arrive() -> None:
    one, two = socket.socketpair()
    with one, two:
        read, write = os.pipe()
        wire.send(one, {"text": "é" * 20_000}, [write])
        received = wire.receive(two)
        assert received is not None
        message, (copy,) = received
        assert message == {"text": "é" * 20_000}
        os.write(copy, b"x")
        assert os.read(read, 1) == b"x"
        for file in (read, write, copy):
            os.close(file)
        one.close()
        assert wire.receive(two) is None


def traced(*lines: str) -> str | None:
    found = rank.last_traceback([(float(at), line) for at, line in enumerate(lines)])
    return found and f"{found[0]:.0f} {found[1]}"


def test_finds_the_last_traceback() -> None:
    head = "Traceback (most recent call last):"
    assert traced("all", "is well") is None
    assert traced("x", head, "  File", "E: 1", "y", head, "  File", "E: 2") == f"5 {head}\n  File\nE: 2"
    text = (head, "  File", "E: 1", "", "The above exception was the direct cause of:", "", head, "E: 2")
    assert traced("x", *text) == "1 " + "\n".join(text)
    assert (
        traced(f"[rank3]: {head}", "other", "[rank3]: E: 1", "[rank3]:", "[rank3]:[W1] pg")
        == f"0 {head}\nE: 1\n"
    )


def test_a_rank_ends_as_its_program_does(tmp_path: Path) -> None:
    keeper = [sys.executable, "-I", "-S", rank.__file__, sys.executable, "-c"]

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*keeper, code], capture_output=True, text=True, env={"RANK": "5"})

    assert run("print('a', end='')").stdout == "a\n"
    assert run("print('a' * 3_000_000)").stdout == "a" * 3_000_000 + "\n"
    killed = run("import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    raised = run("raise ValueError('ü' * 2000)")
    assert raised.returncode == 1
    node = Node(0, code=1)
    for line in raised.stderr.split("\n"):
        if line.startswith(rank.MARK):
            assert len(line) < 4096
            message = json.loads(line.removeprefix(rank.MARK))
            if "line" not in message:
                node.hear(message)
    assert node.failure().rank == 5
    assert str(node.failure().traceback).endswith("ValueError: " + "ü" * 2000)


QUICK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rank", sys.argv[1])
rank = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rank)
rank._NOW_AND_THEN = 0.3
sys.exit(rank.main(sys.argv[2:]))
"""
PRINTS = "import time\nfor _ in range(1000): print('on', flush=True); time.sleep(0.05)"


def test_a_rank_that_is_continued_is_known_to_be_though_it_never_stops_printing() -> None:
    keeper = [sys.executable, "-I", "-S", "-c", QUICK, rank.__file__, sys.executable, "-I", "-S", "-c"]
    with subprocess.Popen(
        [*keeper, PRINTS], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={"RANK": "5"}
    ) as process:
        assert process.stderr is not None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not children.read_text():
            time.sleep(0.01)
        pid = int(children.read_text())
        # Until it has become the program, it has the keeper's handlers of signals.
        while QUICK.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.01)
        # A keeper that goes by what is printed says nothing for as long as there is more.
        ends = threading.Timer(20, lambda: os.kill(pid, signal.SIGKILL))
        ends.start()
        told = []
        for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
            os.kill(pid, number)
            told.append(json.loads(process.stderr.readline().removeprefix(rank.MARK)))
        ends.cancel()
    assert told[:2] == [{"rank": 5, "stopped": True}, {"rank": 5, "stopped": False}]
    assert (told[2]["code"], told[2]["frozen"]) == (-9, False)


def heard(node: Node, rank: int, code: int, time: float, traceback: str = "") -> None:
    if traceback:
        node.hear({"rank": rank, "traceback": traceback})
    node.hear({"rank": rank, "code": code, "time": time})


def test_blames_the_cause_not_its_consequences() -> None:
    one = Node(0, code=1)
    heard(one, 0, 1, 5.0, "RuntimeError: Connection closed by peer")
    heard(one, 1, -15, 6.0)
    two = Node(1, code=1)
    heard(two, 3, -15, 5.5)
    heard(two, 2, 7, 7.0)
    assert [node.number for node in sorted([one, two], key=lambda node: node.order)] == [1, 0]
    assert two.failure() == Failure(1, 2, "exit code 7")
    assert one.failure().rank == 0


def test_what_a_stopped_node_does_is_no_failure() -> None:
    node = Node(0, code=-9, stopped=True)
    heard(node, 0, -15, 1.0)
    assert not node.failed


def test_words() -> None:
    assert reason(-9) == "killed by SIGKILL"
    assert reason(-60) == "killed by signal 60"
    assert str(Failure(1, 2, reason(-9))) == "rank 2 was killed by SIGKILL (node 1)"
    assert str(Failure(1, 2, reason(1))) == "rank 2 ended with exit code 1 (node 1)"
    assert not Result(1, (), False, 1.0).ok


def test_the_rank_gets_back_what_only_the_launcher_shall_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    environment = launch.environment(Cluster(1, 1), 0, {})
    assert environment["LOGLEVEL"] == "CRITICAL"
    assert json.loads(environment[rank.RESTORE]) == {"LOGLEVEL": "DEBUG", "TORCH_CPP_LOG_LEVEL": None}


def test_refusal_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"user.max_user_namespaces": "0", "kernel.apparmor_restrict_unprivileged_userns": "1"}
    monkeypatch.setattr(namespaces, "_setting", settings.get)
    text = str(namespaces.refused(OSError(errno.EPERM, "Operation not permitted")))
    assert "user.max_user_namespaces is 0, it must be a number above 0" in text
    assert "kernel.apparmor_restrict_unprivileged_userns is 1, it must be 0" in text
    assert "unprivileged_userns_clone" not in text
    assert "--cluster local:N" in text
    monkeypatch.setattr(namespaces, "_setting", {"user.max_user_namespaces": "5"}.get)
    assert "container" in str(namespaces.refused(OSError(errno.EPERM, "Operation not permitted")))
    assert "used up" in str(namespaces.refused(OSError(errno.ENOSPC, "No space left on device")))


def test_a_rank_ended_by_the_launcher_after_its_exception_is_judged_by_the_exception() -> None:
    head = "Traceback (most recent call last):"
    uncaught = [(1.0, f"[rank2]: {head}"), (1.0, "[rank2]: ValueError: x")]
    assert rank.verdict(-15, 9.0, uncaught) == (1, 1.0, f"{head}\nValueError: x")
    logged = [(1.0, head), (1.0, "ValueError: x, caught and logged")]
    assert rank.verdict(-15, 9.0, logged) == (-15, 9.0, "")
    assert rank.verdict(7, 9.0, logged) == (7, 1.0, "\n".join(line for _, line in logged))


def test_a_keeper_that_was_killed_is_named_by_torchrun_and_no_other() -> None:
    summary = (
        "Root Cause (first observed failure):\n  rank      : 2 (local_rank: 0)\n  exitcode  : -9 (pid: 5)"
    )
    node = Node(1, code=1, ended=8.0)
    node.last_lines.extend(summary.split("\n"))
    heard(node, 3, 1, 5.0, "RuntimeError: Connection closed by peer")
    assert node.cause is not None
    assert (node.cause.rank, node.cause.code) == (2, -9)
    heard(node, 2, 1, 6.0, "RuntimeError: Connection closed by peer")
    assert node.cause.rank == 3


def test_a_forked_rank_has_an_error_for_a_closed_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python begins: by the signal a member died whose neighbour had frozen."""
    found: list[object] = []
    worker = SimpleNamespace(main=lambda arguments: found.append(signal.getsignal(signal.SIGPIPE)))
    monkeypatch.setitem(sys.modules, supervisor._WORKER, worker)
    monkeypatch.setattr(supervisor, "name_thread", lambda name: None)
    monkeypatch.setattr(rank, "keep", lambda become, alone: become())
    monkeypatch.setattr(rank, "environment", lambda: {**os.environ, "RANK": "0"})
    monkeypatch.setenv("RANK", "0")
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    supervisor._watch_fork([])
    assert found == [signal.SIG_IGN]
    signal.signal(signal.SIGPIPE, before)
