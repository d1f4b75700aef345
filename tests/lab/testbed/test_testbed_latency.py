from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.cluster_plans import FRAMES
from tacit_lab.testbed import Testbed
from tacit_lab.testbed.network import relay

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]

MARK = f"TACIT_TEST_OF={os.getpid()}"
"""In the environment of all that these tests start, as other tests have relays of their own."""


@pytest.fixture(autouse=True)
def marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*MARK.split("="))


def relays() -> set[int]:
    """The processes of relays of this test."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                named = (entry / "comm").read_text().strip() == relay.NAME
                if named and MARK.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.add(int(entry.name))
    return found


def measured(cluster: str, program: Path, trips: int = 40, pause: float = 0.01, connections: int = 4) -> Any:
    """Seconds of round trips, and bit/s of payload in each half second."""
    lines: list[str] = []
    with Testbed(Cluster.parse(cluster)) as testbed:
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


@pytest.mark.parametrize(("cluster", "latency", "rate"), [("2x1@100mbit,30ms", 30e-3, 1e8)])
def test_packets_are_late_and_links_carry_their_rate(
    programs: Path, cluster: str, latency: float, rate: float
) -> None:
    found = measured(cluster, programs / "late.py")
    assert len(found["trips"]) == 40
    assert 0.95 * latency <= min(found["trips"]) / 2 <= 1.05 * latency
    assert 0.95 * rate <= max(found["rates"]) / FRAMES <= 1.05 * rate


def test_nodes_can_be_late_by_different_times(programs: Path) -> None:
    found = measured("nodes=[1x1@100mbit,1ms,1x1@100mbit,19ms]", programs / "late.py")
    assert 19e-3 <= min(found["trips"]) <= 21e-3


def test_a_relay_that_ends_ends_the_run(programs: Path) -> None:
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


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "_TUN", "/dev/net/none")
    with pytest.raises(TestbedError, match=r"sch_netem.* needs /dev/net/none, .*modprobe tun"):
        relay.Relay(None, 0, [])
