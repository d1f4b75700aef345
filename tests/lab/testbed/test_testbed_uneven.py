from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tacit.errors import TestbedError
from tacit.links import Links
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed
from tacit_lab.testbed.network import background

pytestmark = [pytest.mark.testbed, pytest.mark.usefixtures("namespaces")]

UNEVEN = Cluster.parse("nodes=[2x1@200mbit,1x1@20mbit+load=10mbit]")


@pytest.fixture
def loads(processes_named: Callable[[str], set[int]]) -> Callable[[], set[int]]:
    """Finds the processes of background loads of this test."""
    return partial(processes_named, background.NAME)


def test_links_have_their_own_rates_and_loads(programs: Path, loads: Callable[[], set[int]]) -> None:
    found: list[str] = []
    with Testbed(UNEVEN) as testbed:
        result = testbed.run(
            [str(programs / "loads.py")], on_line=lambda _, line: found.append(line), timeout=100
        )
        assert result.ok, found
        assert not loads()  # between two runs there is none
        sent = {each["node"]: each for each in map(json.loads, found)}
        assert 0.3 * 10e6 <= sent[2]["rate"] <= 1.15 * 10e6, sent
        assert max(sent[0]["rate"], sent[1]["rate"]) < 1e6, sent
        assert abs(sent[2]["ours"]) < 600_000, sent  # of 1.2 million bytes, by two counters in turn

        found.clear()
        words = ["-m", "tacit.probe", "--json", "--seconds", "0.2"]
        assert testbed.run(words, on_line=lambda _, line: found.append(line), timeout=100).ok, found
    assert not loads()
    links = Links.from_json(next(line for line in found if line.startswith("{")))
    print(links)
    fast, into, out = links.rate[0][1], links.rate[0][2], links.rate[2][0]
    assert fast is not None
    assert into is not None
    assert out is not None
    assert 25e6 < fast <= 210e6
    assert 3e6 <= into <= 21e6
    assert 3e6 <= out <= 17e6  # what waits for an idle link passes at once


def test_a_load_that_ends_ends_the_run(programs: Path, loads: Callable[[], set[int]]) -> None:
    killed: list[int] = []

    def kill(_: int, line: str) -> None:
        for process in loads():
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    with (
        pytest.raises(TestbedError, match="background load of node 1 has ended"),
        Testbed(Cluster.parse("nodes=[1x1@100mbit,1x1@100mbit+load=10mbit]")) as testbed,
    ):
        testbed.run([str(programs / "linger.py"), "hang"], on_line=kill, timeout=60)
    assert killed
    end = time.monotonic() + 10
    while loads() and time.monotonic() < end:
        time.sleep(0.05)
    assert not loads()
