from dataclasses import replace

import pytest
from sample_records import ALONE, DDP, TOPK

from tacit_lab.records import EndRecord
from tacit_lab.reports.charts.split import TimeSplit, split


def parts(*ends: EndRecord) -> list[tuple[float, float, bool]]:
    return [(each.compute, each.exposed, each.derived) for each in split(ends)]


def test_what_a_session_reports_is_taken_as_it_is() -> None:
    (found,) = split([TOPK])
    assert found == TimeSplit(algorithm="topk:ratio=0.01", compute=4.0, exposed=6.0, derived=False)
    assert found.total == 10.0


def test_plain_ddp_has_no_session_so_compute_only_is_subtracted() -> None:
    assert parts(DDP, ALONE) == [(3.0, 57.0, True)]
    assert parts(replace(DDP, metrics={}), ALONE) == [(3.0, 57.0, True)]


def test_auto_has_measured_no_wait_of_the_ddp_that_it_begins_with() -> None:
    auto = replace(TOPK, metrics={**TOPK.metrics, "choice": {"algorithm": "topk"}})
    assert parts(auto, ALONE) == [(3.0, 7.0, True)]
    assert parts(auto) == []


def test_what_cannot_be_split_is_left_out() -> None:
    assert parts(DDP) == []
    assert parts(replace(TOPK, status="failed"), replace(TOPK, algorithm="b", seconds=None), ALONE) == []


@pytest.mark.parametrize(("exposed", "expected"), [(-1.0, 0.0), (99.0, 10.0)])
def test_no_part_is_negative(exposed: float, expected: float) -> None:
    (found,) = split([replace(TOPK, metrics={"rounds": 1, "exposed_seconds": exposed})])
    assert (found.exposed, found.total) == (expected, 10.0)
