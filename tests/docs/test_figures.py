"""Figures on the pages that come from a file of benchmarks/results are those of the file."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from pages import ROOT, rows_of, text_of

import accuracy
import accuracy_page
import choosing
import choosing_map
import fingerprints
import paper_page
import papers
from cases import for_each
from experiments import PAPERS
from paired import RESULTS
from tacit_lab import records, reports
from tacit_lab.reports.comparison import compare
from tacit_lab.reports.table import cells
from tacit_lab.study.jobs import written

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


def saved(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    """What all trainings come to, of each arm, task and length."""
    done = accuracy.read(RESULTS / accuracy.FILE)
    rows = accuracy.STUDY.rows(done, accuracy.STUDY.there(done), range(accuracy.CHOOSING))
    return list(accuracy_page.enough(rows))


def test_the_tables_of_accuracies_are_made_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    text, once = accuracy_page.PAGE.read_text(), accuracy.once(accuracy.read(RESULTS / accuracy.FILE))

    def marked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As on the page: to look at all fingerprints takes a minute."""
        texts = [written(row["arm"], row["steps"]) for row in rows]
        return [{**row, "stands": f"| `{arm}` † |" not in text} for row, arm in zip(rows, texts, strict=True)]

    assert accuracy_page.page(marked(trained), marked(once), accuracy.PLAIN) == text


def test_what_has_no_mark_was_looked_at(trained: list[dict[str, Any]]) -> None:
    """Whether a noted fingerprint is still that of today, `accuracy.py --table --publish` asks: a minute."""
    text, noted = accuracy_page.PAGE.read_text(), fingerprints.noted()
    for row in trained:
        if row["arm"] not in (*noted, accuracy.PLAIN) and not any("NVIDIA" in each for each in row["on"]):
            assert f"| `{written(row['arm'], row['steps'])}` | {row['bytes']:.2%} |" not in text


def test_the_maps_are_of_the_clocks_steps_and_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    found = json.loads(choosing_map.FILE.read_text())
    assert choosing_map.figure(found["steps"], trained) == choosing_map.FIGURE.read_text()
    assert choosing_map.table(found, trained) in choosing_map.PAGE.read_text()


def test_the_gaps_of_the_summary_are_those_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    rows = [row for row in rows_of("accuracy.md") if row[0].strip("*").startswith("`")]
    found = 0
    for first, *others in rows:
        (name,) = re.findall(r"`([^`]+)`", first)
        gaps = [each["gap"] for each in trained if written(each["arm"], each["steps"]) == name]
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


def test_shards_of_few_bits_take_the_time_that_was_measured() -> None:
    shown = {row[0]: row[1:] for row in rows_of("fsdp.md")}
    for row in saved("2026-11-29-shards-quick")["rows"]:
        ratio, megabytes = row["speedup"]["median"], row["mb_per_step_and_node"]
        assert shown[row["arm"]] == [f"{row['step_ms']:.0f}", f"{ratio:.2f}", f"{megabytes:.2f}"]


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


def test_the_milliseconds_of_ddps_bytes_are_right() -> None:
    rows = [row for row in rows_of("how-to-choose.md") if re.match(r"1\d* [mb]illion, ", row[0])]
    assert len(rows) == 6
    for name, *columns in rows:
        count, word, kind = name.replace(",", "").split()
        bits = int(count) * {"million": 1e6, "billion": 1e9}[word] * {"fp32": 32, "bf16": 16}[kind]
        for gbit, said in zip((1, 10, 25, 100), columns, strict=True):
            for ranks, ms in zip((4, 16), said.split(", "), strict=True):
                exact = 2 * (ranks - 1) / ranks * bits / (gbit * 1e9) * 1e3
                assert float(ms.replace(",", "")) == float(f"{exact:.2g}")


def test_the_readmes_comparison_is_the_run_that_is_kept() -> None:
    found, _ = reports.salvage(RESULTS / "demo.jsonl", records.read)
    readme = (ROOT / "README.md").read_text().splitlines()
    comparison = compare(found)
    rows = [cells(row, comparison.columns) for row in comparison.rows]
    assert len(rows) == 6
    for row in rows:
        assert row in [line.split() for line in readme]


def test_the_readmes_gaps_are_those_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    found = 0
    for line in (ROOT / "README.md").read_text().splitlines():
        names = {text.partition(":")[0] for text in re.findall(r"`([\w:=,.-]+)`", line)}
        gaps = [each["gap"] for each in trained if not names or each["arm"].partition(":")[0] in names]
        for mean, digits, half in re.findall(r"([+-]\d+\.(\d+)) ± (\d+\.\d+)", line):
            near, both = 0.51 * 10 ** -len(digits), (float(mean), float(half))
            known = [(100 * gap["mean"], 100 * gap["half"]) for gap in gaps]
            assert any(abs(a - both[0]) <= near and abs(b - both[1]) <= near for a, b in known), (names, both)
            found += 1
    assert found >= 14


def test_the_readmes_shares_of_computing_alone_are_those_that_were_timed() -> None:
    timed = {row["arm"]: row["shares"]["compute-only"]["median"] for row in saved(LEAN[0])["lean"][1:]}
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "`topk`, `powersgd`, `dgc` or `efsign` keeps 0.7 to 0.9 of" in text
    assert {f"{timed[arm]:.1f}" for arm in ("topk", "powersgd", "dgc", "efsign")} <= {"0.7", "0.8", "0.9"}
    assert f"(`int8` {timed['int8']:.2f}, `bf16` {timed['bf16']:.2f})" in text
    assert f"plain DDP at 100 Mbit/s keeps {timed['ddp']:.2f}" in text


def plainly(text: str) -> str:
    """With the minus sign of programs, and without what makes a text bold."""
    return text.replace("−", "-").replace("*", "")


def of_arm(trained: list[dict[str, Any]], task: str, steps: int, name: str) -> dict[str, Any]:
    """What the trainings of this arm came to."""
    (row,) = (
        row
        for row in trained
        if (row["task"], row["steps"]) == (task, steps) and written(row["arm"], steps) == name
    )
    return row


LOWBIT = [("cifar10-large", 624), ("cifar10-large", 2340), ("mnist", 600), ("mnist", 2400)]
"""The columns of the table of docs/lowbit.md."""


def test_the_gaps_of_few_bits_are_those_of_the_trainings(trained: list[dict[str, Any]]) -> None:
    found = 0
    for first, *others in (row for row in rows_of("lowbit.md") if len(row) == 5):
        for (task, steps), cell in zip(LOWBIT, map(plainly, others), strict=True):
            match = re.fullmatch(r"([+-]\S+ ± \S+)(?: points)? at (\S+) %(?: of the bytes)?", cell)
            if match:
                row = of_arm(trained, task, steps, plainly(first).strip("`"))
                digits = len(match[2].partition(".")[2])
                assert match.groups() == (
                    accuracy_page.points(row["gap"]),
                    f"{100 * row['bytes']:.{digits}f}",
                )
                found += 1
    assert found > 20


NEAR = {
    "near-only": "near-only",
    "`daso` cycling, every 4 steps": "daso",
    "the same, by slices": "daso, slices",
    "`ednncomm`, every 16": "ednncomm",
    "`ddp`": "ddp",
    "`daso:by=slices`, two epochs blocking": "daso",
    "`daso:period=auto,by=slices`, in bf16": "daso",
}
"""The pages' word for each arm of benchmarks/levels.py."""
SCENES = {"1 Gbit/s": "1gbit", "1 Gbit/s, ten epochs of 8 steps": "whole", "100 Mbit/s": "100mbit"}
BY_NODE = ("papers/daso.md", "papers/ednncomm.md")


@for_each("page", BY_NODE)
def test_steps_by_node_are_those_that_were_timed(page: str) -> None:
    timed = {(row["scene"], row["arm"]): row for row in saved("2026-11-21-levels")["rows"]}
    scene, rows = "", [row for row in rows_of(page) if len(row) == 6 and row[1] in NEAR]
    for links, arm, ms, megabytes, of_near, hoped in rows:
        scene = SCENES.get(links, scene)
        row = timed[scene, NEAR[arm]]
        assert ms == f"{row['step_ms']:.0f}"
        assert megabytes == f"{row['mb_per_step_and_node']:.1f}".removesuffix(".0")
        if row["against"] == "near-only":
            assert (of_near, hoped) == (f"{row['found']:.2f}", f"{row['promised']:.2f}")
        elif row["against"]:
            less = [f"{1 - 1 / row[each]:.0%}".replace("%", " %") for each in ("found", "promised")]
            assert (of_near, hoped) == (f"{less[0]} less time than `ddp`", less[1])
    assert len(rows) == 8


def test_rounds_take_what_was_measured() -> None:
    measured = [
        [
            f"{row['step_ms']:.0f}",
            f"{row['of_compute_only']:.2f}".removesuffix(".00"),
            f"{row['mb_per_step_and_node']:.2f}".removesuffix(".00"),
        ]
        for row in saved("2026-11-21-rounds")["rows"]
    ]
    text = text_of("overhead.md").partition("\n## What is left to wait for")[2]
    shown = [line.strip("|\n").split("|")[1:] for line in text.splitlines() if line.startswith("| ")]
    assert [[cell.strip() for cell in row] for row in shown[1:]] == measured


def test_steps_of_planned_messages_are_those_that_were_timed() -> None:
    rows = saved("2026-11-25-order")["rows"]["scheduled"]
    timed = {row["arm"]: row for row in rows if (row["model"], row["cluster"]) == ("vgg11", "4x1@1gbit")}
    (shown,) = (row for row in rows_of("overhead.md") if row[0] == "four ranks on two cores")
    arms = (timed[arm]["ms"] for arm in ("ddp", "fusion", "priority"))
    assert shown[1:] == [f"{ms:.0f}" for ms in (timed["ddp"]["compute_only_ms"], *arms)]


def test_gossip_on_more_nodes_takes_what_was_measured() -> None:
    rows = saved("2026-11-25-order")["rows"]["gossip"]
    timed = {
        (row["how"], row["nodes"], row["arm"].replace(":graph=exponential", "")): row["ms"] for row in rows
    }
    shown = [row for row in rows_of("papers/index.md") if len(row) == 6 and re.fullmatch(r"[\d,]+", row[1])]
    columns = (("testbed", 4), ("testbed", 8), ("clock", 4), ("clock", 8), ("clock", 16))
    for name, *cells_ in shown:
        assert cells_ == [f"{timed[*column, name.strip('`')]:,.0f}" for column in columns]
    assert len(shown) == 4


def test_the_papers_tables_are_made_of_trainings_and_windows(trained: list[dict[str, Any]]) -> None:
    arms = {arm for paper in PAPERS.values() for arm in paper.arms}
    texts = {page: text_of(f"papers/{page}") for page in dict.fromkeys(each.page for each in PAPERS.values())}
    whole = "".join(texts.values())
    rows = [  # which stand is read from the pages: to look at fingerprints takes a minute
        {**row, "stands": f"| `{written(row['arm'], row['steps'])}` † |" not in whole}
        for row in trained
        if row["arm"] in arms
    ]
    made = paper_page.pages(rows, papers.timed(RESULTS / papers.FILE))
    for page, text in texts.items():
        assert paper_page.placed(text, made[page], page) == text, "run python benchmarks/papers.py --publish"


def test_predictions_are_as_good_as_was_found() -> None:
    found = saved("2026-11-24-foresight")
    whole, held = found["verdicts"]["all"], found["verdicts"]["held out"]
    rows = {row[0]: row[1:] for row in rows_of("planning.md") if len(row) == 5}
    for name, each in (("not looked at before", held), ("all", whole)):
        counts = [str(each[key]) for key in ("configurations", "within_10", "within_25")]
        assert rows[name] == [*counts, f"{100 * each['worst']:.1f} %"]
    formulas = [
        f"{whole['configurations']}",
        f"{whole['formulas_within_10']}",
        "",
        f"{100 * whole['formulas_worst']:.0f} %",
    ]
    assert rows["all, by the closed formulas of the literature"] == formulas
    over = [each["over_best"] for each in found["auto"]]
    said = (
        f"in {sum(each <= 0.05 for each in over)} of {len(over)} choices (by model, cluster and what is "
        f"accepted); the worst was {100 * max(over):.1f} % slower than the best"
    )
    assert said in " ".join(text_of("planning.md").split())


def test_the_pages_rates_by_connections_and_congestion_control_are_the_files() -> None:
    found = saved("2026-11-29-network")["rows"]
    shown = [cells[1:] for cells in rows_of("network.md")]

    def rates(row: Any, *names: str) -> list[str]:
        return [f"{row['found'][name] / 1e6:.3g}" for name in names or row["found"]]

    lossy = [row for row in found["tcp"] if "loss" in row["cluster"]]
    names = ("reno 1", "reno 4", "cubic 1", "cubic 4", "cubic 8", "bbr 1", "bbr 4")
    told = [
        *(rates(row, *names) for row in lossy),
        *(rates(row) for part in ("gloo", "buffers") for row in found[part]),
    ]
    assert len(told) == 8
    steps = [f"{1e3 * each:,.0f}" for each in found["ddp"][0]["found"].values()]
    told += [steps[:4], steps[4:8], steps[8:]]
    assert all(row in shown for row in told)
