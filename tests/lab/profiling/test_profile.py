"""A profile's arithmetic and its table: stages and threads add up to the processor time."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit_lab.profiling.profile import (
    ENDED,
    ProfileRow,
    RankProfile,
    Summary,
    ThreadProfile,
    read,
)
from tacit_lab.profiling.stages import UNATTRIBUTED

MS = 1_000_000
MAIN = ThreadProfile(
    "main",
    ({"forward": 3 * MS, UNATTRIBUTED: MS}, {"forward": 5 * MS}),
)
LANE = ThreadProfile("tacit: lane", ({"encode": 2 * MS}, {"encode": MS, "decode": MS}))
PROFILE = RankProfile(
    rank=0,
    first=3,
    wall_ns=(20 * MS, 30 * MS),
    process_ns=(7 * MS, 8 * MS),
    threads=(MAIN, LANE),
    timing_ns=4 * MS,
)


def test_every_thread_is_the_sum_of_its_stages() -> None:
    rows = PROFILE.rows()
    for thread in PROFILE.threads:
        own = sum(row.ms for row in rows if row.thread == thread.name)
        assert own == pytest.approx(thread.cpu_ns / PROFILE.steps / MS, rel=1e-12)
    assert sum(row.ms for row in rows) == pytest.approx(15 / 2, rel=1e-12)
    assert ProfileRow("main", "forward", 4.0) in rows
    assert ProfileRow("main", UNATTRIBUTED, 0.5) in rows
    assert ProfileRow("tacit: lane", "decode", 0.5) in rows
    assert rows[-1] == ProfileRow(ENDED, UNATTRIBUTED, (15 - 13) / 2)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "profile0.json").write_text(PROFILE.to_json())
    (tmp_path / "rank0.json").write_text("{}")
    assert read(tmp_path) == [PROFILE]
    (tmp_path / "profile1.json").write_text('{"threads": [{}]}')
    with pytest.raises(ConfigError, match="holds no profile of a rank"):
        read(tmp_path)


def test_a_summary_is_the_mean_of_the_ranks_and_adds_up() -> None:
    other = RankProfile(
        rank=1,
        first=3,
        wall_ns=(40 * MS,),
        process_ns=(4 * MS,),
        threads=(ThreadProfile("main", ({"forward": 4 * MS},)),),
    )
    summary = Summary.of([PROFILE, other])
    assert (summary.ranks, summary.steps, summary.first) == (2, 1, 3)
    assert summary.cpu_ms == pytest.approx((7.5 + 4) / 2)
    assert summary.wall_ms == pytest.approx((25 + 40) / 2)
    assert sum(summary.by_thread().values()) == pytest.approx(summary.cpu_ms, rel=1e-12)
    assert summary.by_thread()["main"] == pytest.approx((4.5 + 4) / 2)
    json.dumps(asdict(summary))


def test_no_ranks_have_no_summary() -> None:
    with pytest.raises(ConfigError, match="no rank has written its profile"):
        Summary.of([])


def numbers(lines: list[str], head: str, end: str = "") -> dict[tuple[str, str], float]:
    """The processor times below this heading, by the two columns before them."""
    start = next(i for i, line in enumerate(lines) if line.startswith(head)) + 1
    column = lines[start - 1].index("CPU") + 3
    stop = next((i for i in range(start, len(lines)) if lines[i] == end), len(lines))
    return {
        (line[:26].strip(), line[26 : column - 9].strip()): float(line[column - 9 : column])
        for line in lines[start:stop]
        if not line.startswith("Timing")
    }


def test_the_tables_show_every_thread_and_stage_and_add_up() -> None:
    lines = Summary.of([PROFILE]).lines()
    assert lines[0].startswith("Processor time in ms a rank and step (one rank, steps 3 to 4): 7.5;")
    by_thread = numbers(lines, "thread                          CPU")
    assert by_thread == {("main", ""): 4.5, ("tacit: lane", ""): 2, (ENDED, ""): 1, ("all", ""): 7.5}
    stages = numbers(lines, "thread                    stage")
    assert stages["main", "forward"] == 4
    assert sum(stages.values()) == pytest.approx(7.5)
    assert lines[-1] == "Timing the stages took about 2.00 of all; it counts in them."


def test_small_stages_are_told_together_and_nothing_is_lost() -> None:
    stages = {"large": 10_000 * MS, **{f"small{i}": MS for i in range(5)}}
    many = RankProfile(
        rank=0,
        first=1,
        wall_ns=(MS,),
        process_ns=(10_005 * MS,),
        threads=(ThreadProfile("main", (stages,)), ThreadProfile("tiny", ({"alone": MS},))),
    )
    found = numbers(Summary.of([many]).lines(), "thread                    stage")
    assert found["main", "5 smaller stages"] == 5
    assert found["tiny", "alone"] == 1
    assert found[ENDED, UNATTRIBUTED] == -1
    assert sum(found.values()) == 10_005
