"""Figures on the pages that come from a file of benchmarks/results are those of the file."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pages import ROOT

import accuracy
import accuracy_page
import choosing
from cases import for_each
from paired import RESULTS
from tacit_lab import records, reports
from tacit_lab.reports.comparison import compare
from tacit_lab.reports.table import cells

GAP = re.compile(r"\**([+-]\d+\.(\d+)) ± (\d+\.\d+)\**")
LEAN = (
    "2026-11-29-overhead-lean-slow",
    "2026-11-26-overhead-lean-fast-passes",
    "2026-11-26-overhead-lean-small-passes",
)
DOORS = {
    "DDP": "ddp",
    "FSDP2 in each machine, nothing between them": "near-only",
    "FSDP2, `ddp` between machines": "dense",
    "FSDP2, gradients in 4 bits with error feedback": "int4",
    "FSDP2, `localsgd:sync_every=8,bits=4`": "localsgd",
    "FSDP2, `diloco:sync_every=32,bits=4`": "diloco",
}
"""The page's word for each arm of benchmarks/doors.py."""
CODECS = {
    "top-k 1 %": "topk 1% + EF",
    "top-k 0.1 %": "topk 0.1% + EF",
    "sign by blocks": "sign by blocks + EF",
    "QSGD 4 bits": "qsgd 4 bits",
    "TernGrad": "terngrad",
    "int8 with": "int8 + EF",
    "blocks of 3 bits": "blocks of 3 bits + EF",
}
"""How a row of the page begins, and its name in benchmarks/compressors.py."""


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


def rows_of(page: str) -> Iterator[list[str]]:
    """The cells of each row of the page's tables."""
    for line in text_of(page).splitlines():
        if line.startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def saved(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """What all trainings come to, of each arm, task and length."""
    done = accuracy.read(RESULTS / accuracy.FILE)
    rows = accuracy.rows(done, accuracy.there(done), accuracy.CHOOSING)
    return list(accuracy_page.enough(rows))


def test_the_tables_of_accuracies_are_made_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    text = accuracy_page.PAGE.read_text()
    (machine,) = re.findall(r"` on (\S.+), (\d+) cores,\s+torch (\S+);", text)
    about = dict(zip(("cpu", "cores", "torch"), machine, strict=True))
    assert accuracy_page.page(trained, about, accuracy.PLAIN) == text


def test_the_gaps_of_the_summary_are_those_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    rows = [row for row in rows_of("accuracy.md") if row[0].strip("*").startswith("`")]
    found = 0
    for first, *others in rows:
        (name,) = re.findall(r"`([^`]+)`", first)
        gaps = [each["gap"] for each in trained if accuracy_page.written(each["arm"], each["steps"]) == name]
        for mean, places, half in (match.groups() for match in map(GAP.fullmatch, others) if match):
            digits = len(places)
            known = {(f"{100 * g['mean']:+.{digits}f}", f"{100 * g['half']:.{digits}f}") for g in gaps}
            assert (mean, half) in known, f"{name}: {mean} ± {half} is none of {known}"
            found += 1
    assert found > 40


def test_the_table_of_speeds_is_made_of_the_windows() -> None:
    scale = choosing.Scale(blocks=choosing.BLOCKS, data=choosing.IMAGES, quick=False)
    table = choosing.table(choosing.found_of(choosing.FILE, replace(scale, data=choosing.IMAGES)))
    assert table in choosing.PAGE.read_text()


def test_steps_are_those_that_were_timed() -> None:
    timed: list[list[str]] = []
    for name in LEAN:
        rows = saved(name)["lean"]
        nothing = {row["arm"]: row["cpu_beyond_ms"] for row in rows}["noop"]
        for row in rows:
            median = {arm: share["median"] for arm, share in row["shares"].items()}
            beyond = f"{row['cpu_beyond_ms'] - nothing:.0f}"
            timed.append(
                [
                    f"{row['step_ms']:.0f}",
                    f"{median.get('ddp', 1):.2f}",
                    f"{median.get('compute-only', 1):.2f}",
                    f"{row['mb_per_step_and_node']:.2f}",
                    "" if row["arm"] in ("compute-only", "noop") else beyond,
                ]
            )
    rows = [row[2:] for row in rows_of("overhead.md") if len(row) == 7]
    shown = [row for row in rows if re.fullmatch(r"\d+\.\d\d", row[3])]
    assert len(shown) > 30
    assert not [row for row in shown if row not in timed]


def test_the_first_page_says_what_ddp_uses() -> None:
    timed = {row["arm"]: row["step_ms"] for row in saved(LEAN[0])["lean"]}
    alone, whole = timed["compute-only"], timed["ddp"]
    text = " ".join(text_of("index.md").split())
    assert f"computes a step in {alone:.0f} ms, but the whole step takes {whole:.0f} ms" in text
    assert f"Plain DDP uses {alone / whole:.0%}".replace("%", " %") in text


@for_each("label", DOORS)
def test_a_sharded_model_takes_the_time_and_memory_that_were_measured(label: str) -> None:
    ((_, ms, _, megabytes, memory, loss),) = [row for row in rows_of("fsdp.md") if row[0] == label]
    time, room, lost = (
        {row["arm"]: row for row in saved(f"2026-11-26-doors-{part}")[part]}.get(DOORS[label])
        for part in ("time", "memory", "loss")
    )
    assert ms == f"{time['step_ms']:,.0f}"
    assert megabytes == f"{time['mb_per_step_and_node']:.2f}".removesuffix(".00")
    own = f"; {room['own_mb']:.0f}" if room["own_mb"] > 1 else ""
    assert memory == f"{room['peak_mb']:.0f}{own}"
    if lost and lost["arm"] != "ddp":
        assert loss == f"{lost['gap_percent']:+.1f} % ± {lost['gap_half']:.1f}"


def test_the_sentence_on_a_sharded_models_memory_is_right() -> None:
    room = {row["arm"]: row for row in saved("2026-11-26-doors-memory")["memory"]}
    mine, alone = room["int4"], room["near-only"]
    said = (
        f"{mine['peak_mb']:.0f} MB where FSDP2 alone takes {alone['peak_mb']:.0f}, "
        f"{mine['of_near_only'] - 1:.0%} more; {mine['own_mb']:.0f} MB of these"
    )
    assert said.replace("%", " %") in " ".join(text_of("fsdp.md").split())


@for_each("begins", CODECS)
def test_compressing_takes_the_copies_that_were_measured(begins: str) -> None:
    (row,) = [row for row in rows_of("overhead.md") if row[0].startswith(begins)]
    measured = {
        each["numel"]: f"{each['copies']['median']:.1f}"
        for each in saved("2026-11-26-compressors")["rows"]
        if each["row"] == CODECS[begins]
    }
    assert row[1:] == [measured[numel] for numel in (25_000_000, 9_200_000, 270_000)]


def test_steps_on_a_gpu_are_those_that_were_timed() -> None:
    timed = saved("2026-11-26-gpu-h100")["steps"]
    for first, ratio, host in [row for row in rows_of("gpus.md") if len(row) == 3 and " (1." in row[1]]:
        name = first.partition(",")[0].strip("`")
        then = "mp2" if name == "lowbit" else name  # what is lowbit was called mp2 on that day
        found = [each for each in timed if each["algorithm"] == then]
        known = {
            "{median:.3f} ({q1:.3f} to {q3:.3f})".format(**each["ratio"]): each.get("hook_ms")
            for each in found
        }
        assert ratio in known, f"{name}: {known}"
        assert host in ("–", f"{known[ratio] or 0:.1f} ms")


def test_the_readmes_comparison_is_the_run_that_is_kept() -> None:
    found, _ = reports.salvage(RESULTS / "demo.jsonl", records.read)
    readme = (ROOT / "README.md").read_text().splitlines()
    rows = [cells(row) for row in compare(found).rows]
    assert len(rows) == 6
    for row in rows:
        assert row in [line.split() for line in readme]
