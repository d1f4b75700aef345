from __future__ import annotations

import json
import os
import signal
import socket
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forked_testbeds import forked_testbeds
from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.cluster_plans import FRAMES
from tacit_lab.testbed import Testbed
from tacit_lab.testbed.network import relay
from tacit_lab.testbed.network.nodes import mac
from tacit_lab.testbed.results import Relayed

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]


@pytest.fixture
def relays(processes_named: Callable[[str], set[int]]) -> Callable[[], set[int]]:
    """Finds the processes of relays of this test."""
    return partial(processes_named, relay.NAME)


def measured(cluster: str, program: Path, trips: int = 40, pause: float = 0.01, connections: int = 4) -> Any:
    """Seconds of round trips, and bit/s of payload in each half second."""
    lines: list[str] = []
    with forked_testbeds(), Testbed(Cluster.parse(cluster)) as testbed:
        words = [str(program), str(trips), str(pause), str(connections)]
        result = testbed.run(words, on_line=lambda _, line: lines.append(line), timeout=100)
    assert result.ok, lines
    found = {}
    for line in lines:
        if line.startswith("{"):
            found |= json.loads(line)
    print(
        cluster, [f"{1e3 * each:.2f}" for each in found["trips"]], [f"{each:.3g}" for each in found["rates"]]
    )
    return found


def assert_carries(payload: float, rates: list[float]) -> None:
    """Check that a link carries so many bit/s, but for moments in which the machine does something else."""
    assert max(rates) >= 0.5 * payload  # what else the machine does takes the rest
    begun = next(number for number, each in enumerate(rates) if each)
    assert statistics.mean(rates[begun:]) <= 1.2 * payload  # some had come before it was read


@pytest.mark.parametrize(("cluster", "latency", "rate"), [("2x1@100mbit,30ms", 30e-3, 1e8)])
def test_packets_are_late_and_links_carry_their_rate(
    programs: Path, cluster: str, latency: float, rate: float
) -> None:
    found = measured(cluster, programs / "late.py")
    assert len(found["trips"]) == 40
    assert 0.95 * latency <= min(found["trips"]) / 2 <= 1.9 * latency  # once each way
    assert_carries(rate * FRAMES, found["rates"])


def test_nodes_can_be_late_by_different_times(programs: Path) -> None:
    found = measured("nodes=[1x1@100mbit,1ms,1x1@100mbit,19ms]", programs / "late.py")
    assert 19e-3 <= min(found["trips"]) <= 36e-3


def test_jitter_spreads_what_packets_take(programs: Path) -> None:
    found = measured("2x1@100mbit,10ms±4ms", programs / "late.py", trips=200)
    assert len(found["trips"]) == 200
    assert 12e-3 <= min(found["trips"]) < 20e-3  # of two links, at the least 6 ms each
    assert max(found["trips"]) >= 24e-3
    assert statistics.median(found["trips"]) >= 18.5e-3


def test_packets_are_lost_by_their_share(programs: Path) -> None:
    found = measured("2x1@100mbit,5%loss", programs / "late.py", trips=600, pause=0.005)
    there_and_back = 0.95**2
    assert abs(len(found["trips"]) / 600 - there_and_back) <= 6 * (there_and_back * 0.0975 / 600) ** 0.5


def test_packets_are_no_larger_than_the_mtu(programs: Path) -> None:
    found = measured("2x1@100mbit,mtu=600", programs / "late.py")
    assert found["refused"] == [601]  # bytes of a packet that must not be cut
    assert_carries(1e8 * (600 - 52) / 614, found["rates"])


def test_a_way_that_loses_large_packets_is_named_by_the_probe(programs: Path) -> None:
    lines: list[str] = []
    with forked_testbeds(), Testbed(Cluster.parse("2x1@100mbit")) as testbed:
        words = [str(programs / "black_hole.py"), "1400"]
        assert testbed.run(words, on_line=lambda _, line: lines.append(line), timeout=100).ok, lines
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(found) == 2
    for each in found:
        assert "small messages pass between node 0 and node 1, and large ones do not" in each["said"]
        assert "ip link set dev eth0 mtu 1280" in each["said"]


@pytest.mark.parametrize(
    ("cluster", "reaches"),
    [
        ("3x1@nat", {0: [], 1: [0], 2: [0]}),
        ("nodes=[2x1@1gbit,1x1@1gbit,nat]", {0: [1], 1: [0], 2: [0, 1]}),
    ],
)
def test_nobody_opens_a_connection_to_a_node_behind_a_nat(
    programs: Path, cluster: str, reaches: dict[int, list[int]]
) -> None:
    lines: list[str] = []
    with forked_testbeds(), Testbed(Cluster.parse(cluster)) as testbed:
        words = [str(programs / "reach.py")]
        assert testbed.run(words, on_line=lambda _, line: lines.append(line), timeout=60).ok, lines
    assert {each["node"]: each["reaches"] for each in map(json.loads, lines)} == reaches


def test_a_busy_relay_is_told() -> None:
    assert Relayed(0.2, 0.03, 1e-4).doubt is None
    assert "0.70 of a processor core" in str(Relayed(0.7, 0.03, 1e-4))
    assert "2.00 ms later" in str(Relayed(0.2, 0.03, 2e-3))
    with Testbed(Cluster.parse("2x1@20ms")) as testbed:
        relayed = testbed.run(["-c", "pass"], timeout=60).relayed
    assert relayed is not None
    assert 0 <= relayed.cores <= 1.1
    assert relayed.wanted == pytest.approx(0.02)
    print(relayed, relayed.late)


def test_a_relay_that_ends_ends_the_run(programs: Path, relays: Callable[[], set[int]]) -> None:
    killed: list[int] = []

    def kill(_: int, line: str) -> None:
        for process in relays():
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    with (
        pytest.raises(TestbedError, match="the relay that makes packets late has ended"),
        Testbed(Cluster.parse("2x1@100mbit,10ms")) as testbed,
    ):
        testbed.run([str(programs / "linger.py"), "hang"], on_line=kill, timeout=60)
    assert killed
    assert not relays()


class _Routes:
    """Takes what is set of links, and knows one."""

    def link_lookup(self, ifname: str) -> list[int]:
        return [1]

    def link(self, *_: object, **__: object) -> None: ...
    def brport(self, *_: object, **__: object) -> None: ...


def test_what_goes_to_another_place_arrives_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order in which packets leave, not by their times: those to another place were sent first."""
    ours, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)

    def packet(sender: int, receiver: bytes) -> bytes:
        return bytes(10) + receiver + mac_bytes(sender) + b"."

    def mac_bytes(node: int) -> bytes:
        return bytes.fromhex(mac(node).replace(":", ""))

    ends = [(0, mac_bytes(2)), (3, mac_bytes(1)), (0, mac_bytes(1)), (3, mac_bytes(2)), (1, b"\xff" * 6)]
    sent = [packet(*each) for each in ends]
    left: list[bytes] = []

    def write(_: int, data: bytes) -> None:
        left.append(data)
        if len(left) == len(sent):
            raise InterruptedError

    with ours, device, monkeypatch.context() as patched:
        patched.setattr(relay.os, "open", lambda *_: device.fileno())
        patched.setattr(relay.fcntl, "ioctl", lambda *_: 0)
        patched.setattr(relay.gc, "disable", lambda: None)
        patched.setattr(relay.os, "sched_setscheduler", lambda *_: None)
        patched.setattr(relay.os, "write", write)
        made = relay.Relay(_Routes(), 0, Cluster.parse("4x1@100mbit,1ms,2places=60ms"))
        for each in sent:
            ours.send(each)
        with pytest.raises(InterruptedError):
            made.carry()
    assert left == [*sent[2:], *sent[:2]]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_TUN", "/dev/net/none")
    with pytest.raises(TestbedError, match=r"sch_netem.* needs /dev/net/none, .*modprobe tun"):
        relay.Relay(None, 0, Cluster.parse("2x1@5ms"))
