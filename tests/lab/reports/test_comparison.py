from dataclasses import replace

import pytest
import sample_records
from rich.console import Console
from sample_records import ALONE, DDP, HEAD

from tacit.errors import ConfigError
from tacit_lab import records, reports

TOPK = replace(sample_records.TOPK, algorithm="topk", seconds=7.5, accuracy=0.9, seconds_to_target=None)


def rows(*ends: records.EndRecord) -> dict[str, reports.Row]:
    return {row.algorithm: row for row in reports.compare([HEAD, *ends]).rows}


def printed(*ends: records.EndRecord, head: records.RunRecord = HEAD) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(reports.table(reports.compare([head, *ends])))
    return capture.get()


def test_a_row_is_measured_against_ddp_wherever_it_stands() -> None:
    row = rows(TOPK, DDP, ALONE)["topk"]
    assert row.speedup == 8.0
    assert row.reduction == pytest.approx(0.95)
    assert row.of_compute_only == 0.4
    assert (row.accuracy, row.seconds_to_target, row.status) == (0.9, None, "ok")


def test_ddp_is_one_time_as_fast_as_itself() -> None:
    row = rows(DDP)["ddp"]
    assert (row.speedup, row.reduction, row.of_compute_only, row.seconds_to_target) == (1.0, 0.0, None, 30.0)


def test_without_ddp_the_first_row_is_the_base() -> None:
    other = replace(TOPK, algorithm="bf16", seconds=15.0, mb_between_nodes=100.0)
    found = rows(TOPK, other)
    assert (found["topk"].speedup, found["bf16"].speedup, found["bf16"].reduction) == (1.0, 0.5, -1.0)


def test_compute_only_is_the_limit_and_no_row() -> None:
    comparison = reports.compare([HEAD, ALONE, DDP])
    assert comparison.compute_only_seconds == 3.0
    assert [row.algorithm for row in comparison.rows] == ["ddp"]
    assert comparison.rows[0].of_compute_only == 0.05


def test_what_cannot_be_divided_is_none() -> None:
    nothing = replace(DDP, mb_between_nodes=0.0, seconds=0.0)
    row = rows(nothing, ALONE)["ddp"]
    assert (row.speedup, row.reduction, row.of_compute_only, row.mb_between_nodes) == (None, None, None, 0.0)
    row = rows(DDP, replace(TOPK, mb_between_nodes=None))["topk"]
    assert (row.mb_between_nodes, row.reduction, row.speedup) == (None, None, 8.0)


def test_a_failed_run_has_a_row_of_nothing_but_its_status() -> None:
    failed = records.EndRecord(algorithm="topk", status="failed", error="rank 1 was killed")
    row = rows(DDP, failed, ALONE)["topk"]
    assert row.status == "failed"
    assert {row.seconds, row.speedup, row.reduction, row.of_compute_only, row.accuracy} == {None}


def test_the_last_end_of_an_algorithm_counts() -> None:
    assert rows(DDP, TOPK, replace(TOPK, seconds=6.0))["topk"].speedup == 10.0


def test_runs_that_differ_in_their_task_are_not_compared() -> None:
    other = replace(HEAD, algorithm="topk", epochs=3)
    with pytest.raises(ConfigError, match="ddp and topk cannot be compared: epochs was 2 for one and 3"):
        reports.compare([HEAD, other, DDP, TOPK])
    with pytest.raises(ConfigError, match="no run"):
        reports.compare([DDP])


def test_the_table_fits_80_characters_and_says_what_its_columns_mean() -> None:
    text = printed(DDP, replace(TOPK, algorithm="localsgd:sync_every=8"), ALONE)
    assert max(map(len, text.splitlines())) <= 80
    assert "localsgd:sync_every=8 " in text
    assert "8.00x" in text
    assert "95.0%" in text
    assert "40.0%" in text
    assert "no network" not in text
    for name in reports.MEANINGS:
        assert f"{name}: {reports.MEANINGS[name]}" in text


def test_a_table_without_a_shaped_network_says_so_and_shows_dashes() -> None:
    head = replace(HEAD, cluster="local:4", shaped=False)
    text = printed(replace(DDP, mb_between_nodes=None), head=head)
    assert text.splitlines()[0] == "digits on local:4 (no network was shaped)"
    line = next(line for line in text.splitlines() if line.startswith("ddp"))
    assert line.split() == ["ddp", "0.9800", "60.0", "30.0", "1.00x", "–", "–", "–"]


def test_a_failed_run_is_marked_in_the_table() -> None:
    failed = records.EndRecord(algorithm="topk", status="failed")
    assert "topk (failed)" in printed(DDP, failed)


def seeded(end: records.EndRecord, *seeds: int, **numbers: list[float]) -> list[records.EndRecord]:
    """The same end with several seeds; of each number a value a seed."""
    return [
        replace(end, seed=seed, **{name: values[i] for name, values in numbers.items()})
        for i, seed in enumerate(seeds)
    ]


def test_of_several_seeds_there_are_means_and_gaps_are_paired() -> None:
    ends = [
        *seeded(DDP, 0, 1, 2, accuracy=[0.9, 0.8, 0.7], seconds=[60.0, 62.0, 58.0]),
        *seeded(TOPK, 0, 1, 2, accuracy=[0.91, 0.81, 0.71], seconds=[10.0, 31.0, 29.0]),
    ]
    comparison = reports.compare([HEAD, *ends, ALONE])
    ddp, topk = comparison.rows
    assert comparison.seeds == (0, 1, 2)
    assert "gap" in comparison.columns
    assert ddp.gap is None
    assert topk.gap is not None
    assert topk.accuracy == pytest.approx(0.81)
    assert (topk.gap.mean, topk.gap.half, topk.gap.count) == (pytest.approx(0.01), pytest.approx(0), 3)
    assert topk.seconds == pytest.approx(70 / 3)
    assert topk.speedups is not None
    assert topk.speedups.mean == pytest.approx((6 + 2 + 2) / 3)


def test_a_seed_that_one_of_two_has_is_in_no_pair() -> None:
    ends = [*seeded(DDP, 0, 1), *seeded(TOPK, 1, 2, accuracy=[0.9, 0.5])]
    topk = reports.compare([HEAD, *ends]).rows[1]
    assert topk.gap is not None
    assert (topk.gap.mean, topk.gap.count) == (pytest.approx(0.9 - 0.98), 1)


def test_runs_that_chose_a_rate_count_for_nothing_else() -> None:
    chosen = [replace(TOPK, seed=seed, rate=2.0, accuracy=0.9) for seed in (0, 1)]
    tried = [replace(TOPK, seed=records.CHOOSING, rate=rate, accuracy=0.1) for rate in (1.0, 2.0, 4.0)]
    row = reports.compare([HEAD, *tried, *seeded(DDP, 0, 1), *chosen]).rows[1]
    assert (row.rate, row.accuracy, row.seeds) == (2.0, pytest.approx(0.9), 2)


def test_a_script_that_reports_a_loss_alone_is_compared_by_it() -> None:
    head = replace(HEAD, epochs=None, target=None, batch_per_rank=None)
    ends = [replace(end, accuracy=None, loss=loss) for end, loss in ((DDP, 1.0), (TOPK, 1.5))]
    comparison = reports.compare([head, *ends])
    assert [*comparison.columns][:2] == ["loss", "seconds"]
    assert comparison.rows[1].gap is not None
    assert comparison.rows[1].gap.mean == 0.5


def test_replicas_that_come_and_go_are_measured_against_the_first_of_them() -> None:
    lowbit, diloco = (
        replace(TOPK, algorithm=f"{name} under churn", seconds=20.0) for name in ("lowbit", "diloco")
    )
    ends = (ALONE, DDP, lowbit, replace(diloco, seconds=10.0, mb_between_nodes=25.0))
    found = rows(*ends)
    assert found["ddp"].speedup == 1.0
    assert (found["lowbit under churn"].speedup, found["lowbit under churn"].reduction) == (1.0, 0.0)
    assert (found["diloco under churn"].speedup, found["diloco under churn"].reduction) == (2.0, 0.5)
    mixed, alone = reports.compare([HEAD, *ends]), reports.compare([HEAD, *ends[2:]])
    for comparison in (mixed, alone):
        assert comparison.columns["speedup"] == (
            "seconds of ddp (without it, and under churn: of the first row) / seconds"
        )
        assert "under churn all seconds" in comparison.columns["to target"]
        assert "under churn until the last replica" in comparison.columns["seconds"]
    assert "of compute-only" in mixed.columns
    assert "of compute-only" not in alone.columns
    assert "without communication" not in printed(*ends[2:])
    assert "under churn" not in str(reports.compare([HEAD, *ends[:2]]).columns)
