"""Whose seconds a block has, where ranks do not wait for each other."""

from pathlib import Path

import pytest

from forked_testbeds import forked_testbeds
from launched import in_testbed

ALONE = """
import sys, time
sys.path.insert(0, {benchmarks!r})
from arms import on_all_ranks, ranks
from launched import tell
from paired import Arm

with ranks(60) as rank:
    arms = {{"mine": Arm(lambda: time.sleep(0.3 * rank), 2, 0), "theirs": Arm(lambda: None)}}
    found = on_all_ranks(arms, 2)
    if rank == 0:
        tell(found)
"""


@pytest.mark.testbed
@pytest.mark.usefixtures("namespaces")
def test_a_block_lasts_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE.format(benchmarks=str(Path(__file__).parents[2] / "benchmarks")))
    with forked_testbeds():
        found = in_testbed("2x1@1gbit", [str(script)], timeout=120)
    assert [each >= 0.3 for each in found["mine"]] == [True, True]
    assert max(found["theirs"]) < 0.3
