"""A rank that is cut off from the node of the launcher's store ends soon after its time-out, and says why."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from forked_testbeds import ALL, forked_testbeds
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Testbed

HERE = Path(__file__).parent
TIMEOUT = 8.0
EXIT = 20.0
"""Seconds that an interpreter may take to end, beside other tests."""


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("algorithm", "moment", "how"),
    [
        ("topk", "training", "caught"),
        ("topk", "training", "uncaught"),
        ("localsgd:sync_every=100", "closing", "caught"),
    ],
)
def test_it_ends_within_seconds_of_its_time_out(
    tmp_path: Path, algorithm: str, moment: str, how: str
) -> None:
    if shutil.which("ip") is None:
        pytest.skip("there is no program ip, which takes the link down")
    lines: list[str] = []
    fresh = ALL if how == "uncaught" else ()
    with forked_testbeds(fresh), Testbed(Cluster.parse("2x1")) as bed:
        bed.run(
            [str(HERE / "rank_cut_off.py"), algorithm, str(tmp_path), moment, how],
            env={"PYTHONPATH": ":".join(sys.path)},
            on_line=lambda node, line: lines.append(f"{node}: {line}"),
            timeout=120,
        )
    file = tmp_path / "rank1.json"
    assert file.exists(), "\n".join(lines)
    said = json.loads(file.read_text())
    print(said)
    assert said["seconds"] < 4 * TIMEOUT + (EXIT if how == "uncaught" else 0), said
    if how == "uncaught":
        assert any("PeerLost: the launcher's store cannot be reached" in line for line in lines), lines
        return
    assert said["kind"] == "PeerLost", said
    assert "the launcher's store cannot be reached" in said["says"]
