import re
from dataclasses import replace
from html import unescape
from importlib.resources import files

import pytest
from sample_records import ALONE, DDP, HEAD, TOPK, WHOLE, comparison
from unpacked import figures_of, unpacked

from tacit.errors import ConfigError
from tacit_lab import records, reports
from tacit_lab.reports.charts.curves import charts
from tacit_lab.reports.charts.figures import DASHES, PALETTE, Figure, Style, styles

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def body(*ends: records.EndRecord, head: records.RunRecord = HEAD, cut: bool = False) -> str:
    return unpacked(reports.page(comparison(*ends, head=head), cut=cut))


def cells(text: str) -> list[list[str]]:
    rows = re.findall(r'<tr[^>]*><th scope="row"><i[^>]*></i>(.*?)</tr>', text)
    return [
        [unescape(cell) for cell in re.split("</t[hd]>", re.sub("<td[^>]*>", "", row)) if cell]
        for row in rows
    ]


def figures(*ends: records.EndRecord) -> dict[str, Figure]:
    found = comparison(*ends)
    return {chart.key: chart.figure for chart in charts(reports.compare(found), found)}


def test_the_table_has_the_terminal_tables_figures() -> None:
    assert cells(body(DDP, TOPK, ALONE)) == [
        ["ddp", "0.9800", "60.0", "30.0", "1.00x", "1000.0", "0.0%", "5.0%"],
        ["topk:ratio=0.01", "0.9720", "10.0", "6.0", "6.00x", "50.0", "95.0%", "30.0%"],
    ]


def test_every_cell_has_its_columns_name_for_narrow_screens() -> None:
    row = re.findall(r'<tr><th scope="row">.*?</tr>', body(DDP))[0]
    assert re.findall(r'<td data-column="([^"]*)">', row) == list(reports.MEANINGS)


def test_what_was_not_measured_is_a_dash() -> None:
    (row,) = cells(body(replace(DDP, mb_between_nodes=None)))
    assert row == ["ddp", "0.9800", "60.0", "30.0", "1.00x", "–", "–", "–"]


def test_the_columns_are_explained_below_the_table() -> None:
    text = unescape(body(DDP))
    for name, meaning in reports.MEANINGS.items():
        assert f"<dt>{name}</dt><dd>{meaning}</dd>" in text


def test_everything_from_the_records_is_escaped() -> None:
    here = replace(HEAD.environment, cpu=EVIL, kernel=EVIL)
    head = replace(HEAD, recipe=EVIL, cluster=EVIL, strategy=EVIL, shaped=False, environment=here)
    failed = records.EndRecord(algorithm=EVIL + "2", status="failed", error=EVIL)
    text = body(DDP, replace(TOPK, algorithm=EVIL), failed, ALONE, head=head)
    assert EVIL not in text
    assert "<img" not in text
    assert len(re.findall(r"<script", text)) == 2  # the figures and the page's own script


def test_the_page_asks_no_network_for_anything() -> None:
    text = body(DDP, TOPK, ALONE)
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", text)
    assert "default-src 'none'" in text


def test_a_failed_run_is_shown_and_said() -> None:
    text = body(DDP, replace(TOPK, status="failed", seconds=None, error="rank 1 was killed"), ALONE)
    assert "topk:ratio=0.01 failed: rank 1 was killed" in text
    assert "topk:ratio=0.01 (failed)" in text


def test_an_interrupted_run_shows_the_epochs_that_it_had() -> None:
    text = unpacked(reports.page(WHOLE[:-5]))
    assert "topk:ratio=0.01 has no end in the records: it was still running" in text
    assert '"name": "topk:ratio=0.01"' in text


def test_a_run_that_never_began_is_a_page_too() -> None:
    text = reports.page([records.EndRecord(algorithm="ddp", status="failed", error="no root")])
    assert "No run began" in text
    assert "ddp failed: no root" in text
    assert "<table" not in text
    assert "plotly" not in text


def test_nothing_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="empty"):
        reports.page([])


def test_no_shaped_network_and_a_cut_line_are_in_plain_sight() -> None:
    text = body(DDP, head=replace(HEAD, shaped=False), cut=True)
    assert '<span class="badge">no network was shaped</span>' in text
    assert "cut short" in text
    assert "cut short" not in body(DDP)
    assert "badge" not in body(DDP).partition("</style>")[2]


def test_without_javascript_a_note_stands_for_the_charts() -> None:
    assert "<noscript>" in body(DDP)


def test_the_configuration_and_the_environment_are_there() -> None:
    text = body(DDP, TOPK, ALONE)
    for word in ("983,114", "A Processor", "Strategy(name=&#x27;ddp&#x27;)", "2026-01-02T03:04:05+00:00"):
        assert word in text


def test_runs_of_two_machines_name_both() -> None:
    other = replace(HEAD, environment=replace(HEAD.environment, cpu="Another", date="2026-01-03"))
    text = reports.page([*comparison(DDP), *comparison(TOPK, head=other)])
    assert "A Processor / Another" in text
    assert "2026-01-02T03:04:05+00:00 to 2026-01-03" in text


def test_every_algorithm_has_one_colour_and_ddp_always_the_neutral_one() -> None:
    expected = {"ddp": Style("--base"), "topk:ratio=0.01": Style("--c0")}
    assert styles(reports.compare(WHOLE)) == expected
    assert styles(reports.compare(comparison(TOPK))) == expected


def test_many_algorithms_are_told_apart_in_the_charts_and_by_their_keys() -> None:
    ends = [DDP, *(replace(TOPK, algorithm=f"topk:ratio=0.{i}") for i in range(1, 29))]
    lines = [trace["line"] for trace in figures(*ends)["loss-seconds"]["data"]]
    assert len({(line["color"], line["dash"]) for line in lines}) == len(ends) == 29
    assert [line["dash"] for line in lines[:9]] == ["solid"] * 8 + ["dash"]
    text = body(*ends)
    for line, end in zip(lines, ends, strict=True):
        swatch = f'<i class="{line["dash"]}" style="color: {line["color"]}"></i>{end.algorithm}'
        assert text.count(f"{swatch}</li>") == text.count(f"{swatch}</th>") == 1


def test_the_style_sheet_knows_all_colours_and_dashes() -> None:
    sheet = (files("tacit_lab.reports") / "page.css").read_text(encoding="utf-8")
    for i in range(PALETTE):
        assert sheet.count(f" --c{i}: #") == 2, "light and dark"
    for dash in DASHES[1:]:
        assert f"table i.{dash}, .key i.{dash} {{" in sheet


def test_the_charts_hold_the_records_numbers() -> None:
    found = figures(DDP, TOPK, ALONE)
    assert list(found) == [
        "accuracy-seconds",
        "accuracy-nodes",
        "loss-seconds",
        "loss-nodes",
        "seconds-split",
    ]
    ddp, topk = found["accuracy-nodes"]["data"]
    assert (ddp["x"], ddp["y"]) == ([500.0, 1000.0], [0.5, 0.95])
    assert (topk["x"], topk["name"]) == ([25.0, 50.0], "topk:ratio=0.01")
    assert found["accuracy-nodes"]["layout"]["xaxis"]["type"] == "log"
    assert found["accuracy-seconds"]["layout"]["shapes"][0]["y0"] == 0.95
    assert "type" not in figures(DDP)["accuracy-seconds"]["layout"]["xaxis"]
    computing, waiting = found["seconds-split"]["data"]
    assert (computing["x"], waiting["x"]) == ([3.0, 4.0], [57.0, 6.0])


def test_without_bytes_and_compute_only_those_charts_are_left_out() -> None:
    assert list(figures(replace(DDP, mb_between_nodes=None))) == ["accuracy-seconds", "loss-seconds"]


def test_losses_that_are_not_finite_are_no_points() -> None:
    found = comparison(DDP)
    broken = [replace(r, loss=None) if isinstance(r, records.EpochRecord) else r for r in found]
    assert [chart.key for chart in charts(reports.compare(broken), broken)] == [
        "accuracy-seconds",
        "accuracy-nodes",
    ]


def test_the_consensus_distance_is_drawn_where_replicas_differ_and_only_there() -> None:
    assert "consensus-distance-epochs" not in figures_of(reports.page(WHOLE))
    apart = [
        replace(each, consensus_distance=3.0 / each.epoch, consensus_relative=0.03 / each.epoch)
        if isinstance(each, records.EpochRecord) and each.algorithm == TOPK.algorithm
        else each
        for each in WHOLE
    ]
    assert [records.parse(each.to_json()) for each in apart] == apart
    drawn = figures_of(reports.page(apart))
    assert drawn["consensus-distance-epochs"]["layout"]["xaxis"]["dtick"] == 1
    (trace,) = drawn["consensus-distance-epochs"]["data"]
    assert (trace["name"], trace["x"], trace["y"]) == (TOPK.algorithm, [1, 2], [0.03, 0.015])


def test_bands_reach_from_the_lowest_seed_to_the_highest() -> None:
    found: list[records.Record] = []
    for seed, value in ((0, 0.2), (1, 0.6)):
        for each in comparison(DDP, TOPK):
            accuracy = {"accuracy": value} if isinstance(each, records.EpochRecord) else {}
            found.append(replace(each, seed=seed, **accuracy))  # type: ignore[arg-type]
    chart = next(each for each in charts(reports.compare(found), found) if each.key == "accuracy-seconds")
    bands = [each for each in chart.figure["data"] if each["mode"] == "none"]
    lines = [each for each in chart.figure["data"] if "name" in each]
    assert len(bands) == len(lines) == 2
    assert lines[0]["y"] == pytest.approx([0.4, 0.4])
    assert bands[0]["y"] == [0.6, 0.6, 0.2, 0.2]
