"""How growth is told from measurements, and how a run goes on where it was."""

import socket
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import scaling
import scaling_table
from kept import StateSlice
from markdown_tables import part
from paired import ROOT
from scaling import exponent, growth
from tacit.algorithms import registry
from tacit_lab.testbed import Serving

COUNTED = {"packets": 20.0, "cpu_ms": 1.5, "sockets": 0.0, "threads": 2.0, "resident_mb": 400.0}


def row(arm: str, ranks: int, value: float, ranks_per_node: int = 1) -> dict[str, object]:
    return {
        "ladder": "flat", "arm": arm, "ranks": ranks, "ranks_per_node": ranks_per_node, "step_ms": value,
        "mb_per_rank": 3.0, "mb_by_servers": 0.0, **COUNTED,
    }  # fmt: skip


def test_the_exponent_of_a_power_is_found() -> None:
    assert exponent({ranks: 5.0 * ranks**0.75 for ranks in (2, 4, 8, 16)}) == pytest.approx(0.75)
    assert exponent({2: 7.0, 16: 7.0}) == pytest.approx(0.0)
    assert exponent({2: 7.0}) is None
    assert exponent({2: 0.0, 4: 1.0}) is None


def test_growth_is_of_clusters_with_equal_nodes() -> None:
    rows = [row("ddp", ranks, float(ranks)) for ranks in (2, 4, 8)]
    (found,) = growth([*rows, row("ddp", 16, 1000.0, ranks_per_node=4)])
    assert found["ranks"] == [2, 4, 8]
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["mb_per_rank"] == pytest.approx(0.0)
    assert found["sockets"] is None


# ---- clusters -----------------------------------------------------------------------------------------


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What is run on which cluster, and whether with servers; the third of them fails once."""
    asked: list[tuple[str, bool]] = []

    def in_testbed(cluster: str, argv: list[str], *, servers: Serving | None, timeout: float) -> object:
        assert servers is None or isinstance(servers, Serving)
        asked.append((cluster, servers is not None))
        if len(asked) == 3:
            raise SystemExit("no luck")
        name = argv[argv.index("--rank") + 1]
        one = {"step_ms": [2.0, 3.0], "mb_per_rank": 1.0, "mb_by_servers": 0.0, **COUNTED}
        return dict.fromkeys(scaling.LADDERS[name].arms, one)

    monkeypatch.setattr(scaling, "in_testbed", in_testbed)
    return asked


def test_what_failed_is_tried_again_and_nothing_else(
    tmp_path: Path, clusters: list[tuple[str, bool]]
) -> None:
    path, failed = tmp_path / "rows.jsonl", list[str]()
    rows = scaling.climb("flat", False, 2, StateSlice(path), failed)
    assert clusters == [(each, False) for each in scaling.LADDERS["flat"].clusters]
    assert failed == ["8x1@100mbit"]
    kept = StateSlice(path)
    again = scaling.climb("flat", False, 2, kept, failed)
    assert clusters[4:] == [("8x1@100mbit", False)]
    assert failed == ["8x1@100mbit"]
    assert len(again) == len(rows) + len(scaling.LADDERS["flat"].arms)
    kept.forget()
    assert path.read_text() == ""


def test_quick_leaves_out_what_is_slow_and_one_ladder_has_a_server(
    tmp_path: Path, clusters: list[tuple[str, bool]]
) -> None:
    scaling.climb("server", True, 2, StateSlice(tmp_path / "rows.jsonl"), [])
    assert clusters == [("2x1+1@100mbit", True), ("4x1+1@100mbit", True)]
    scaling.climb("nodes", True, 2, StateSlice(tmp_path / "rows.jsonl"), [])
    assert clusters[2:] == [("2x2@100mbit", False), ("4x2@100mbit", False)]


def test_every_family_of_algorithms_is_climbed_with() -> None:
    texts = {arm for ladder in scaling.LADDERS.values() for arm in ladder.arms.values()} - {"compute-only"}
    families = {registry.ENTRIES[text.partition(":")[0]].family for text in texts}
    automatic = {"automatic"}  # it goes on with one of the others
    assert families == set(typing.get_args(registry.Family)) - automatic


# ---- by the planner's clock ---------------------------------------------------------------------------


def test_what_the_clock_foretells_follows_the_formulas() -> None:
    found = scaling.foretell((2, 64))
    assert "lag" not in found, "what it sends depends on the training"
    model = 4 * 1_050_112 / 1e6
    for each in found["ddp"]:  # a ring
        assert each["mb"] == pytest.approx(2 * (each["nodes"] - 1) / each["nodes"] * model, rel=1e-3)
    few, many = found["topk"]  # an all-gather
    assert many["mb"] == pytest.approx(63 * few["mb"], rel=0.05)
    assert few["ms"] < many["ms"]


def test_a_process_counts_its_sockets_and_threads() -> None:
    with socket.socket(), socket.socket(), ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        sockets, threads = scaling.held()
    assert min(sockets, threads) >= 2


# ---- tables -------------------------------------------------------------------------------------------


def result(rows: list[dict[str, object]], **more: object) -> dict[str, object]:
    about = {"date": "2026-01-02", "cpu": "a CPU", "cores": 2, "python": "3", "torch": "2", "commit": "abc"}
    return {"hardware": about, "parameters": 1000, "rows": rows, "growth": growth(rows), **more}


def test_each_quantity_is_a_table_with_what_was_not_measured_left_open() -> None:
    rows = [row("ddp", 2, 2.0), row("ddp", 4, 4.0), row("topk", 4, 3.0)]
    rows = [{**each, "cluster": f"{each['ranks']}x1@1gbit"} for each in rows]
    rows[1]["mb_by_servers"] = 8.25
    foretold = {"ddp": [{"nodes": 1024, "mb": 8.4, "ms": 814.0}]}
    found = scaling_table.table(result(rows, foretold=foretold))
    for line in (
        "| `ddp` | 2 | 4 | 1.00 |",
        "| `topk` | - | 3 | - |",
        "| `ddp` | 3.000 | 3.000 | 0.00 |",
        "| `topk` | - | 20 | - |",
        "| `ddp` | 8.4; 814 |",
    ):
        assert line in found
    assert "held at most 400, 400 MB" in found
    assert "in a step of `ps`: 8.2 MB." in found
    assert "at abc" in found


def test_the_seconds_of_a_count_are_no_table() -> None:
    rows = [{**row("ddp", 2, 2.0), "cluster": "2x1@1gbit", "step_ms": None}]
    found = scaling_table.table(result(rows))
    assert "Milliseconds a step" not in found
    assert "TCP packets" in found


def test_the_page_has_the_tables_of_what_was_saved_last() -> None:
    (found,) = part("scaling.py --publish").findall((ROOT / "docs" / "scaling.md").read_text())
    assert found == scaling_table.page()
