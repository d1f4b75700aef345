"""Tables of docs/ whose times and counts come from a file of benchmarks/results are those of the file."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from pages import PAGES, name, prose, rows_of, text_of

import elastic
import scaling_table
import windows
from cases import for_each
from paired import RESULTS


def saved(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def test_steps_by_latency_are_those_that_were_timed() -> None:
    """Three tables of docs/how-to-choose.md, in their order: by latency.py, papers.py and overhead.py."""
    timed: list[dict[str, dict[str, list[float]]]] = [{}, {}, {}]
    for file in ("latency", "latency-100ms"):
        for row in saved(f"2026-11-29-{file}")["rows"]["steps"]:
            timed[0][row["cluster"]] = {arm: [ms] for arm, ms in row["found"].items()}
    for found in windows.read(RESULTS / "2026-11-30-papers-latency.jsonl"):
        timed[1][found.window.run.cluster] = {
            arm.partition(":w")[0]: [1e3 * each for each in parts[0][1]] for arm, parts in found.parts.items()
        }
    for line in (RESULTS / "2026-11-30-overhead-latency.jsonl").read_text().splitlines():
        for row in json.loads(line)["rows"]:
            timed[2].setdefault(row["cluster"], {})[row["arm"]] = [row["step_ms"]]
    part = text_of("how-to-choose.md").partition("\n### Links of high latency")[2]
    tables, shown = part.partition("\n## ")[0].split("\n| | 1 ms |")[1:], 0
    for text, known in zip(tables, timed, strict=True):
        lines = f"1 ms |{text}".partition("\n\n")[0].splitlines()
        head, *rows = [line.strip("|").split("|") for line in lines]
        links = [each.strip().replace(", 0.1 % loss", ",0.1%loss").replace(" ms", "ms") for each in head]
        nodes = "4x1"
        for first, *row in rows[1:]:
            nodes = (re.findall(r"`(\dx\d)`", first) or [nodes])[0]
            arm = "compute-only" if "alone" in first else first.split("`")[1]
            for cell, at in zip(map(str.strip, row), links, strict=True):
                if cell:
                    blocks = known[f"{nodes}@100mbit,{at}"][arm]
                    middle = f"{statistics.median(blocks):,.0f}"
                    assert cell in (middle, " and ".join(f"{each:,.0f}" for each in sorted(blocks)))
                    shown += 1
    assert shown > 90


def test_collectives_after_a_pause_took_what_was_timed() -> None:
    (row,) = saved("2026-11-29-latency-collectives")["rows"]["collectives"]
    shown = {cells[0].partition(",")[0]: cells[1:] for cells in rows_of("network.md") if len(cells) == 5}
    for kind in ("all-reduce", "all-gather", "all-to-all"):
        both = zip(row["found"][f"{kind}, pause"], row["found"][f"{kind}, pause, steady"], strict=True)
        assert shown[kind] == [f"{without:.0f}, {steady:.0f}" for without, steady in both]


def test_steps_beside_torchs_powersgd_are_those_that_were_timed() -> None:
    timed = [
        [
            f"{row['step_ms']:.0f}",
            f"{row['speedup_over_ddp']['median']:.2f}",
            f"{row['of_compute_only']['median']:.2f}",
            f"{row['mb_per_step_and_node']:.1f}".removesuffix(".0"),
            "" if row["exposed_ms"] is None else f"{row['exposed_ms']:.0f}",
        ]
        for row in saved("2026-11-21-overhead")["rows"]
        if row["experiment"] == "mixed"
    ]
    part = text_of("overhead.md").partition("\n## Against torch's PowerSGD")[2].partition("\n## ")[0]
    shown = [[cell.strip() for cell in line.split("|")[3:-1]] for line in part.splitlines() if "|" in line]
    assert shown[2:] == timed


def test_restarts_took_what_was_timed() -> None:
    shown = [row[1] for row in rows_of("checkpoints.md") if len(row) == 2]
    for seconds in saved("2026-11-29-restarts")["seconds"].values():
        assert ", ".join(map(str, sorted(seconds))) in shown


GOODPUT = {
    "`lowbit`, three seeds": [
        "29-elastic-pinned-lowbit-0",
        "29-elastic-pinned-lowbit-1",
        "30-elastic-pinned-lowbit-2",
    ],
    "`diloco:sync_every=8`, three seeds": [
        "29-elastic-pinned-diloco-0",
        "29-elastic-pinned-diloco-1",
        "30-elastic-pinned-diloco-2",
    ],
    "`dense`": ["30-elastic-pinned-dense-0"],
    "`gossip`": ["30-elastic-pinned-gossip-second"],
    "`zeroone-adam`": ["30-elastic-pinned-zeroone-adam-sixth"],
    "`lowbit:sync_every=2` at 30 ms": ["30-elastic-pinned-lowbit-30ms-third"],
    "`lowbit` by a hub": ["30-elastic-pinned-hub-lowbit-0"],
}
"""How a row of docs/elastic.md begins, and the files that it is of."""


@for_each("begins", GOODPUT)
def test_goodput_is_that_of_the_files_with_the_time_of_first_steps(begins: str) -> None:
    (row,) = (row for row in rows_of("elastic.md") if len(row) == 5 and row[0].startswith(begins))
    files = [saved(f"2026-11-{file}") for file in GOODPUT[begins]]
    assert row[1] == ", ".join(goodput(result["rows"][0], result["settings"]["pace"]) for result in files)


def goodput(run: dict[str, Any], pace: float) -> str:
    """Of six replicas, with the time of the first step of each start."""
    starts = 6 + len(run.get("starts", ()))
    seconds = run["seconds_up"] + (0 if run["counted"] == elastic.COUNTED else pace * starts)
    return f"{run['steps'] * pace / seconds:.3f}"


def test_goodput_beside_torchft_and_hivemind_is_that_of_the_files() -> None:
    files = [saved(f"2026-11-{day}-elastic-peers-local{more}") for day, more in ((29, ""), (30, "-second"))]
    runs = zip(*(result["rows"] for result in files), strict=True)
    known = [", ".join(goodput(run, files[0]["settings"]["pace"]) for run in both) for both in runs]
    shown = [row[1] for row in rows_of("elastic.md") if row[0].startswith(("tacit,", "torchft", "hivemind"))]
    assert shown == known


def test_the_tables_of_scaling_are_those_of_the_last_results() -> None:
    assert scaling_table.page() in scaling_table.PAGE.read_text()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_times_say_of_which_day_they_are(page: Path) -> None:
    for section in re.split(r"^#+ ", prose(page), flags=re.MULTILINE):
        heads = re.findall(r"^(\|.*)\n\| ?-", section, flags=re.MULTILINE)
        if any(re.search(r"\bms\b|seconds", head) for head in heads):
            assert re.search(r"\b2026-\d\d-\d\d\b", section), section.partition("\n")[0]
