"""The page in a real browser that has no network: Chromium, headless."""

import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from browser import DARK, LIGHT, NEEDS_CHROMIUM, opened, titled
from sample_records import ALONE, DDP, TOPK, WHOLE, comparison
from sample_timelines import planned, scheduled, untold

from tacit.timelines import Change
from tacit_lab import reports

pytestmark = NEEDS_CHROMIUM
FRAME = """<!doctype html>
<iframe id="frame" src="report.html" style="width: 390px; height: 844px; border: 0"></iframe>
<script>
onload = () => {
  const inner = document.getElementById("frame").contentDocument, root = inner.documentElement;
  const plain = (html) => new DOMParser().parseFromString(html, "text/html").documentElement.textContent;
  const told = () => {
    if (root.dataset.charts !== "drawn") return setTimeout(told, 50);
    for (const each of inner.querySelectorAll("details")) each.open = true;
    const wide = [...inner.querySelectorAll("main *, footer *")].filter((each) => {
      const { left, right, width } = each.getBoundingClientRect();
      return width > 0 && !each.ownerSVGElement && (left < -1 || right > root.clientWidth + 1);
    }).map((each) => `wide: ${each.tagName}.${each.className}`);
    if (root.scrollWidth > root.clientWidth) wide.push("wide: the page");
    const boxes = [...inner.querySelectorAll(".scroll")]
      .filter((box) => box.scrollWidth > box.clientWidth + 1)
      .map(() => "a table scrolls");
    const results = inner.querySelector(".results .scroll").offsetHeight;
    if (results > 80 * inner.querySelectorAll(".results tr").length) boxes.push("the results are long");
    const unnamed = [...inner.querySelectorAll(".plot")].flatMap((plot) => {
      const ends = plot.getBoundingClientRect();
      const texts = [...plot.querySelectorAll(".annotation-text")].filter((text) => {
        const { left, right } = text.getBoundingClientRect();
        return left >= ends.left - 1 && right <= ends.right + 1;
      }).map((text) => text.textContent);
      return plot.data.filter((trace) => trace.type === "scatter").map((trace) => plain(trace.name))
        .filter((name) => !texts.includes(name)).map((name) => `no label: ${name} in ${plot.id}`);
    });
    const hidden = [...inner.querySelectorAll("table.cards td")]
      .filter((cell) => !cell.getBoundingClientRect().width || !cell.dataset.column)
      .map(() => "a hidden cell");
    document.title = [...wide, ...boxes, ...unnamed, ...hidden].join("; ") || "nothing amiss";
  };
  told();
};
</script>"""
CROWD = ["bf16", "topk:ratio=0.01", "powersgd", "ednncomm", "localsgd:sync_every=16", "int8", "sign"]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(reports.page(WHOLE), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def timed_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the ranks did when, and a schedule in three phases."""
    phases = [
        Change(1, step, {"period": period, "delay": 2.0, "local": 1.0, "phase": phase})
        for step, period, phase in ((0, 4.0, 0.0), (5, 4.0, 1.0), (12, 8.0, 1.0), (15, 8.0, 2.0))
    ]
    path = tmp_path_factory.mktemp("timed") / "report.html"
    timelines = [*untold("ddp"), *scheduled("topk:ratio=0.01", *phases)]
    path.write_text(reports.page(WHOLE, timelines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def shown(timed_page: Path) -> dict[str, tuple[str, list[str]]]:
    """That page, in either theme, and the console."""
    return {theme: opened(timed_page, theme) for theme in (LIGHT, DARK)}


def plots(document: str) -> dict[str, str]:
    """The drawn inside of each chart."""
    parts = re.split(r'<div class="plot[^"]*" id="([\w-]+)"', document)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_charts_are_drawn_and_nothing_is_complained_about(page: Path) -> None:
    document, console = opened(page, wait="")  # as one who prints it or makes a picture of it
    assert console == []
    found = plots(document)
    assert list(found) == [
        "accuracy-seconds",
        "accuracy-nodes",
        "loss-seconds",
        "loss-nodes",
        "seconds-split",
    ]
    bars = found.pop("seconds-split")
    assert bars.count('<g class="point"') == 4
    assert "compute-only 3.0 s" in bars
    for name, chart in found.items():
        assert 'class="main-svg"' in chart, name
        assert chart.count('<path class="js-line" d="M') == 2, name
        assert len(re.findall(r'<path class="point[ "]', chart)) == 4, name
        assert "ddp</tspan>" in chart, name
    assert "target 0.95" in found["accuracy-seconds"]


def test_the_tables_figures_are_the_records(shown: dict[str, tuple[str, list[str]]]) -> None:
    document, _ = shown[LIGHT]
    rows = re.findall(r'<tr><th scope="row"><i[^>]*></i>(.*?)</tr>', document)
    cells = [re.findall(r"(?:^|<td[^>]*>)([^<]+)", unescape(row)) for row in rows]
    for (name, *numbers), end in zip(cells, (DDP, TOPK), strict=True):
        values = [float(number.rstrip("x%")) for number in numbers]
        assert (end.algorithm, end.accuracy, end.seconds, end.seconds_to_target) == (name, *values[:3])
        assert values[4] == end.mb_between_nodes
        assert values[3] == pytest.approx(60.0 / values[1], abs=0.01)
        assert values[6] == pytest.approx(100 * 3.0 / values[1], abs=0.1)


def test_light_and_dark_differ_in_the_charts_too(shown: dict[str, tuple[str, list[str]]]) -> None:
    inks = [set(re.findall(r"fill: rgb\([^)]*\)", document)) for document, _ in shown.values()]
    assert "fill: rgb(91, 100, 112)" in inks[0] - inks[1]
    assert "fill: rgb(162, 171, 183)" in inks[1] - inks[0]


def test_timelines_and_schedules_are_drawn(shown: dict[str, tuple[str, list[str]]]) -> None:
    document, console = shown[LIGHT]
    assert console == []
    found = plots(document)
    assert list(found)[5:] == ["schedule-1", "timeline-0", "timeline-1"]
    for rank in range(4):
        assert found["timeline-0"].count(f">rank {rank}</text>") == 1
    assert found["timeline-0"].count('<g class="point"') == 4 * 6
    # A step of two stretches of computing and one of waiting, two of the rounds exposed as a whole;
    # below it a bar for what was hidden, and one for what was not.
    assert found["timeline-1"].count('<g class="point"') == 4 * (14 * 5 + 4)
    schedule = found["schedule-1"]
    assert schedule.count('<path class="js-line" d="M') == 3
    for word in ("period B", "delay W", "local L", "warm-up", "cycling", "cool-down"):
        assert re.search(rf">{word}</t(span|ext)>", schedule), word


def test_planned_messages_are_drawn_in_lanes(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(reports.page(WHOLE, planned("topk:ratio=0.01")), encoding="utf-8")
    document, console = opened(path)
    assert console == []
    lanes = plots(document)["lanes-0"]
    assert ">1  …r.layer0.weight +2</text>" in lanes.replace("\u00a0", " ")
    # Three bars for each of three steps of training; two for each message, and one more for the first.
    assert lanes.count('<g class="point"') == 3 * 3 + 4 * (2 * 8 + 1)
    assert on_a_phone(path) == "nothing amiss"


def test_light_and_dark_differ_in_the_timelines_too(shown: dict[str, tuple[str, list[str]]]) -> None:
    fills = [
        set(re.findall(r"fill: rgb\([^)]*\)", plots(document)["timeline-1"]))
        for document, _ in shown.values()
    ]
    assert "fill: rgb(0, 114, 178)" in fills[0] - fills[1]
    assert "fill: rgb(74, 169, 230)" in fills[1] - fills[0]


def on_a_phone(page: Path) -> str:
    """What is amiss on a screen of 390 pixels."""
    frame = page.with_name("frame.html")
    frame.write_text(FRAME, encoding="utf-8")
    said, console = titled(frame)
    assert console == []
    return unescape(said)


def test_on_a_phone_nothing_is_cut_and_every_line_is_labelled(timed_page: Path) -> None:
    assert on_a_phone(timed_page) == "nothing amiss"


def test_on_a_phone_lines_that_lie_close_together_are_labelled_too(tmp_path: Path) -> None:
    ends = [replace(TOPK, algorithm=name, seconds=10.0 + i / 10) for i, name in enumerate(CROWD)]
    path = tmp_path / "report.html"
    path.write_text(reports.page(comparison(DDP, *ends, ALONE)), encoding="utf-8")
    assert on_a_phone(path) == "nothing amiss"


def test_on_a_phone_what_is_amiss_would_be_noticed(page: Path) -> None:
    whole = page.read_text(encoding="utf-8")
    wide = whole.replace("</main>", '<p class="far" style="width: 500px">far too wide</p></main>')
    page.write_text(wide, encoding="utf-8")
    assert "wide: P.far" in on_a_phone(page)
    page.write_text(whole.replace("`<b>${escaped(text)}</b>`", '"another"'), encoding="utf-8")
    assert "no label: ddp in accuracy-seconds" in on_a_phone(page)


def test_names_that_look_like_html_are_drawn_as_they_are(tmp_path: Path) -> None:
    named = replace(TOPK, algorithm="<b id=x>bold</b>")
    (tmp_path / "report.html").write_text(reports.page(comparison(DDP, named, ALONE)), encoding="utf-8")
    document, console = opened(tmp_path / "report.html")
    assert console == []
    assert "id=x&gt;bold&lt;/b&gt;</tspan>" in plots(document)["loss-nodes"]
    assert '<b id="x"' not in document


def test_a_complaint_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "broken.html"
    path.write_text("<script>nothing()</script>", encoding="utf-8")
    _, console = opened(path)
    assert any("nothing is not defined" in line for line in console)
