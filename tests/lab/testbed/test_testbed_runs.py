from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from forked_testbeds import forked_testbeds
from tacit.errors import ConfigError, TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed, rank
from tacit_lab.testbed.network.links import burst

pytestmark = pytest.mark.testbed


class Lines(list[tuple[int, str]]):
    """What a run printed."""

    def __call__(self, node: int, line: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.append((node, line))

    @property
    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for _, line in self if line.startswith("{")]

    def __str__(self) -> str:
        return "\n".join(f"{node}: {line}" for node, line in self)


@pytest.mark.usefixtures("namespaces")
def test_is_up_and_down_quickly() -> None:
    start = time.monotonic()
    with Testbed(Cluster.parse("4x2@100mbit")) as testbed:
        up = time.monotonic() - start
        assert testbed.shaped
        assert testbed.interfaces == ("eth0",) * 4
    total = time.monotonic() - start
    print(f"up {up:.2f} s, down {total - up:.2f} s")
    assert total < 30


@pytest.mark.usefixtures("namespaces")
def test_ranks_talk_and_interfaces_count(programs: Path) -> None:
    lines = Lines()
    with forked_testbeds(), Testbed(Cluster.parse("2x2@100mbit")) as testbed:
        result = testbed.run([str(programs / "exchange.py")], on_line=lines, timeout=100)
    assert result.ok, f"{result}\n{lines}"
    ranks = sorted(lines.facts, key=lambda facts: facts["rank"])
    assert [(r["rank"], r["local"], r["node"]) for r in ranks] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert {(r["world"], r["total"]) for r in ranks} == {(4, 6.0)}

    size = 6_000_000
    assert size <= ranks[0]["far"]["sent"] <= 1.08 * size
    assert ranks[0]["near"]["sent"] < 0.01 * size
    far = ranks[2]["far"]
    print(
        f"sent/payload {ranks[0]['far']['sent'] / size:.4f}, {far['received'] * 8 / far['seconds']:.3e} bit/s"
    )
    carried = 100e6 / 8 * far["seconds"]
    assert far["received"] <= carried * 1.02 + burst(100e6) + (64 << 10)
    assert far["received"] >= 0.4 * carried

    for here, there in ((0, 2), (2, 0)):
        (sent, received), (to, of) = ranks[here]["totals"], ranks[here]["peers"]
        node = str(ranks[there]["node"])
        assert [*to] == [*of] == [node]  # what ranks of a node send to each other is in neither
        few = 4000  # bytes of ARP, and of what the bridge itself announces
        assert sent * 0.99 - few <= to[node] <= sent * 1.05  # a packet that was dropped is counted again
        assert received * 0.99 - few <= of[node] <= received
        print(f"counted/sent {to[node] / sent:.4f}, counted/received {of[node] / received:.4f}")


@pytest.mark.usefixtures("namespaces")
def test_congestion_control_is_not_the_machines() -> None:
    lines = Lines()
    code = "print(open('/proc/sys/net/ipv4/tcp_congestion_control').read())"
    with Testbed(Cluster.parse("2x1@100mbit")) as testbed:
        result = testbed.run(["-c", code], on_line=lines, timeout=100)
    assert result.ok, f"{result}\n{lines}"
    told = [line for _, line in lines if line.strip()]
    assert told == ["cubic"] * 2 or told == ["reno"] * 2


@pytest.mark.usefixtures("namespaces")
def test_environment_of_the_ranks(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOGLEVEL", raising=False)
    lines = Lines()
    with Testbed(Cluster.parse("2x1")) as testbed:
        assert not testbed.shaped
        result = testbed.run(
            [str(programs / "where.py"), "--some", "x y"], env={"TACIT_A": "1"}, on_line=lines
        )
    assert result.ok, lines
    assert [node for node, line in sorted(lines) if line == "to stderr"] == [0, 1]
    for number, facts in enumerate(sorted(lines.facts, key=lambda facts: facts["env"]["RANK"])):
        assert facts["host"] == f"node{number}"
        assert facts["argv"] == ["--some", "x y"]
        assert facts["pid"] < 100
        assert facts["env"] == {
            "RANK": str(number),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.77.0.1",
            "OMP_NUM_THREADS": "1",
            "TACIT_A": "1",
            "TACIT_NODE": str(number),
            "TACIT_NODES": "2",
            "TACIT_CLUSTER": "2x1",
            "TACIT_INTERFACE": "eth0",
            "TACIT_NOTES": rank.MARK,
        }


def test_local_processes(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(programs))
    monkeypatch.setenv("PYTHONPATH", str(programs))
    lines = Lines()
    with Testbed(Cluster.parse("local:4")) as testbed:
        assert not testbed.shaped
        assert testbed.interfaces == ()
        result = testbed.run(["-m", "where", "1"], env={"OMP_NUM_THREADS": "3"}, on_line=lines)
    assert result.ok, lines
    assert sorted(facts["env"]["LOCAL_RANK"] for facts in lines.facts) == ["0", "1", "2", "3"]
    assert {facts["env"]["OMP_NUM_THREADS"] for facts in lines.facts} == {"3"}
    assert "TACIT_INTERFACE" not in lines.facts[0]["env"]


def test_lines_go_to_our_own_output_by_default(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Testbed(Cluster.parse("local:1")) as testbed:
        assert testbed.run([str(programs / "where.py")]).ok
    printed = capsys.readouterr()
    assert json.loads(printed.out)["env"]["RANK"] == "0"
    assert printed.err == "to stderr\n"


@pytest.mark.usefixtures("namespaces")
def test_two_testbeds_at_once_and_two_runs_in_one(programs: Path) -> None:
    with forked_testbeds(), Testbed(Cluster.parse("2x1")) as one, Testbed(Cluster.parse("2x1@1gbit")) as two:
        for testbed in (one, two, one):
            lines = Lines()
            assert testbed.run([str(programs / "where.py")], on_line=lines).ok, lines
            assert len(lines.facts) == 2


def test_an_exception_in_on_line_ends_the_testbed(programs: Path) -> None:
    def refuse(node: int, line: str) -> None:
        raise KeyError(line)

    with Testbed(Cluster.parse("local:2")) as testbed:
        with pytest.raises(KeyError):
            testbed.run([str(programs / "where.py")], on_line=refuse)
        with pytest.raises(TestbedError, match="not up"):
            testbed.run(["again.py"])


def test_misuse_is_explained() -> None:
    testbed = Testbed(Cluster.parse("local:1"))
    with pytest.raises(TestbedError, match="with Testbed"):
        testbed.run(["x.py"])
    with testbed:
        with pytest.raises(TestbedError, match="already up"):
            testbed.__enter__()
        for argv in ([], ["-m"]):
            with pytest.raises(ConfigError, match="script"):
                testbed.run(argv)
    testbed.close()
