"""What the papers' tables say of what was trained and timed, and of which windows they are made."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import papers
import windows
from cases import for_each
from experiments import NETWORKS, PAPERS, PRECISIONS, Scale, attached, settled
from paired import Ticks
from paper_page import BEGIN, END, MISSING, claims, figures, latest, pages, placed, withheld
from runs import COMPUTE_ONLY, Run, append
from tacit import algorithms
from windows import Found, Part, Window, parts, plan

MACHINE = {"date": "2026-01-02", "cpu": "a CPU", "cores": 2, "commit": "abc"}
ON_IMAGES = Scale(data="/somewhere/cifar10-jpeg-q75.tar.xz", precision="fp32")
DASO, DGC = PAPERS["daso"], PAPERS["dgc"]


# ---- windows ------------------------------------------------------------------------------------------


def test_a_run_is_made_of_its_phases() -> None:
    assert parts("ddp", 8, 78) == [Part("ddp", 1.0, 3)]
    assert parts("ednncomm", 8, 78) == [Part("ednncomm", 1.0, 78)]
    assert [part.block for part in parts("diloco:sync_every=32", 8, 78)] == [32]
    assert [part.block for part in parts("localsgd:sync_every=2", 8, 78)] == [4], "at least three steps"
    late, blocking = parts("daso:warmup_epochs=1,cooldown_epochs=1,by=slices", 8, 10)
    assert late == Part("daso:warmup_epochs=0,cooldown_epochs=0,by=slices", 0.75, 10)
    assert (blocking.share, blocking.block) == (0.25, 3)
    assert len(parts("daso:warmup_epochs=0,cooldown_epochs=0", 8, 10)) == 1
    assert [part.share for part in parts("daso", 90, 40)] == pytest.approx([82 / 90, 8 / 90]), "its authors'"


def test_a_sparse_warm_up_is_measured_by_itself() -> None:
    found = parts("dgc:ratio=0.01,warmup_steps=40", 2, 100)
    assert [part.text for part in found] == [
        "dgc:ratio=0.01", "dgc:ratio=0.25", "dgc:ratio=0.0625", "dgc:ratio=0.015625", "dgc:ratio=0.01",
    ]  # fmt: skip
    assert [part.share for part in found] == pytest.approx([0.8, 0.05, 0.05, 0.05, 0.05])
    steady, *_, last = parts("dgc:warmup_steps=40", 2, 100)
    assert (steady.text, last.text) == ("dgc", "dgc:ratio=0.00390625"), "its ratio is the default"


@for_each("name", PAPERS)
def test_all_parts_of_what_is_timed_can_be_attached_and_add_up(name: str) -> None:
    paper = PAPERS[name]
    for each in (*paper.windows(ON_IMAGES), *paper.quick().windows(Scale(blocks=2))):
        assert each.algorithms[: len(paper.rivals)] == paper.rivals
        for algorithm in each.algorithms:
            found = parts(algorithm, 90, 40)
            assert sum(part.share for part in found) == pytest.approx(1.0)
            for part in found:
                algorithms.parse(part.text)


def test_windows_hold_few_algorithms_and_always_the_baseline() -> None:
    run = Run(("digits",), "2x2@100mbit")
    names = ["ddp", *(f"powersgd:rank={rank}" for rank in range(1, 18))]
    found = plan(run, names, 2)
    assert [window.algorithms[0] for window in found] == ["ddp"] * 3
    assert sorted({each for window in found for each in window.algorithms}) == sorted(names)
    assert max(len(window.algorithms) for window in found) <= windows.TOGETHER
    assert plan(run, ["ddp"], 2) == [Window(run, ("ddp",), 2)]


def test_windows_are_not_measured_again_but_for_failures_and_another_code(tmp_path: Path) -> None:
    first, second = plan(Run(("digits",), "2x2@100mbit"), [f"powersgd:rank={i}" for i in range(1, 10)], 2)
    asked: list[Window] = []

    def measure(window: Window) -> Found:
        asked.append(window)
        if window == second and len(asked) in (2, 6):
            return Found(window, 22, {}, MACHINE, "no luck")
        return Found(window, 22, {each: [(1.0, [0.1, 0.3], 2.0)] for each in window.algorithms}, MACHINE)

    path = tmp_path / "w.jsonl"

    def made(state: str) -> list[Found]:
        return windows.carry_out([first, second], path, measure, state)

    assert [found.error for found in made("one")] == [None, "no luck"]
    found = made("one")
    assert asked == [first, second, second]
    assert [each.seconds(each.window.algorithms[1]) for each in found] == [0.2, 0.2]
    made("one")
    assert len(asked) == 3
    assert [found.error for found in made("two")] == [None, None]
    assert asked[3:] == [first, second]
    append(path, found[1].to_json()[:-30])
    assert len(papers.timed(path)) == 4, "the failure is left out, and a line that was cut short"


def test_a_step_of_a_run_is_the_mean_over_its_parts() -> None:
    window = Window(Run(("digits",), "2x2"), ("ddp",), 2)
    found = Found(window, 22, {"x": [(0.75, [1.0, 3.0, 2.0], 8.0), (0.25, [10.0], 4.0)]}, MACHINE)
    assert found.seconds("x") == pytest.approx(0.75 * 2 + 0.25 * 10)
    assert found.megabytes("x") == pytest.approx(7.0)
    assert found.steady("x") == (2.0, 8.0)
    assert Found.from_json(found.to_json()).seconds("x") == found.seconds("x")


def test_with_servers_each_algorithm_has_a_launch_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[list[str], bool]] = []

    def launch(cluster: str, words: list[str], *, servers: object, timeout: float) -> dict[str, Any]:
        arms = [arm["text"] for arm in windows.json.loads(words[-1])["arms"]]
        launched.append((arms, servers is not None))
        return {arm: [[0.5, 0.25], 1.0] for arm in arms}

    monkeypatch.setattr(windows, "in_testbed", launch)
    run = Run(("digits",), "4x1+1@100mbit", epochs=90)
    found = windows.measured(Window(run, ("ps", "mp2", "lowbit"), 2))
    assert launched == [([COMPUTE_ONLY], False), (["ps"], True), (["mp2"], True), (["lowbit"], True)]
    assert found.seconds("mp2") == 0.375
    launched.clear()
    windows.measured(Window(replace(run, cluster="4x1@100mbit"), ("ddp", "mp2"), 2))
    assert launched == [([COMPUTE_ONLY, "ddp", "mp2"], False)]


# ---- tables -------------------------------------------------------------------------------------------


def gap(task: str, arm: str, steps: int, mean: float, stands: bool = True) -> dict[str, Any]:
    told = {"task": task, "arm": arm, "steps": steps, "bytes": 0.1, "rate": 2.0, "stands": stands}
    return {**told, "gap": {"mean": mean, "half": 0.0125, "count": 3}}


ROWS = [
    gap("mnist", "daso", 600, -0.02),
    gap("mnist", "daso", 2400, 0.001, stands=False),
    gap("mnist", "fp16", 2400, 0.002),
    gap("mnist", "fp16", 9600, 0.003),
]


def window(blocks: dict[str, list[tuple[float, list[float], float]]], date: str = "2026-01-02") -> Found:
    run = Run(("cifar10", "--model", "vgg11"), "2x2@100mbit", epochs=90)
    return Found(Window(run, tuple(blocks), 3), 40, blocks, {**MACHINE, "date": date})


TIMED = window(
    {
        COMPUTE_ONLY: [(1.0, [0.3, 0.3], 0.0)],
        "ddp": [(1.0, [1.0, 0.9, 1.1], 1.6)],
        "fp16": [(1.0, [0.4, 0.4, 0.4], 0.8)],
        "daso": [(0.75, [0.4, 0.4, 0.6], 0.01), (0.25, [0.8], 0.31)],
    }
)


def test_a_claim_stands_next_to_what_was_found() -> None:
    (row,) = claims([DASO], ROWS, [TIMED]).splitlines()[2:]
    _, title, says, accuracy, time, sent, differs, _ = (cell.strip() for cell in row.split("|"))
    assert (title, says, differs) == (DASO.title, DASO.says, DASO.differs)
    assert accuracy == "CIFAR-10 not trained yet, +0.10 ± 1.25 † (MNIST, 2,400 steps)"
    assert time == "50% less than `ddp` and 25% more than `fp16` (VGG-11, 2x2@100mbit, 2026-01-02)"
    assert sent == "160 times fewer after warm-up, 95% less with it (VGG-11)"


def test_what_is_trained_longest_counts_and_each_arm_has_its_name() -> None:
    arm = DGC.held[0]
    text = claims([DGC], [gap("cifar10", arm, 2400, -0.01), gap("cifar10", arm, 600, -0.11)], [])
    assert "`dgc` -1.00 ± 1.25 (CIFAR-10, 2,400 steps); `dgc:ratio=0.01`" in text
    assert f"| {MISSING} | {MISSING} |" in text


def test_the_newest_window_that_has_all_rivals_counts() -> None:
    newer = replace(TIMED, hardware={**MACHINE, "date": "2026-02-03"})
    partial = window({key: value for key, value in TIMED.parts.items() if key != "fp16"}, "2026-03-04")
    assert [each.hardware["date"] for _, each in latest(DASO, [TIMED, newer, partial])] == ["2026-02-03"]
    elsewhere = replace(TIMED.window.run, cluster="4x1@100mbit")
    assert not latest(DASO, [replace(TIMED, window=replace(TIMED.window, run=elsewhere))])
    assert latest(DASO.quick(), [TIMED]) == []


def test_others_stand_beside_it_where_they_were_trained_as_long() -> None:
    text = figures(DASO, ROWS, [TIMED])
    trained, _, timed = text.partition("| attached | network |")
    assert "| `daso` | MNIST | 600 |" in trained
    assert "| `daso` † | MNIST | 2,400 | 10.0% | +0.10 ± 1.25 | 3 | 2 |" in trained
    assert "| `fp16` | MNIST | 2,400 |" in trained
    assert "9,600" not in trained
    assert "not looked at since" in trained
    assert "| 500 | 400 to 600 | 0.085 | `ddp` 50%, `fp16` -25% | 2026-01-02, abc |" in timed
    assert "| `ddp` | VGG-11, 9.2 million | 2x2@100mbit | 1,000 | 900 to 1,100 | 1.600 |  |" in timed


def test_every_paper_has_a_place_that_can_be_filled() -> None:
    made = pages(ROWS, [TIMED])
    assert {*made} == {paper.page for paper in PAPERS.values()}
    assert all(paper.title in made["index.md"] for paper in PAPERS.values())
    for name, text in made.items():
        page = (papers.DOCS / name).read_text()
        once = placed(page, text, name)
        assert text in once
        assert placed(once, text, name) == once
        assert page.count(BEGIN) == page.count(END) == 1
    with pytest.raises(SystemExit, match="nothing has no place"):
        placed("empty", "new", "nothing")


def test_a_table_says_of_which_windows_the_processors_were_withheld() -> None:
    assert withheld([TIMED]) == ""
    told = withheld([replace(TIMED, withheld=0.3), replace(TIMED, withheld=0.01), TIMED])
    assert told.endswith(" withheld 30% (vgg11 on 2x2@100mbit); of 1 it is not known.")


def test_withheld_is_a_share_of_the_time_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["cpu  100 0 50 800 10 0 5 20 0 0\ncpu0 1 2", "cpu  150 5 60 900 20 5 10 45 0 0\ncpu0 1 2"])
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: next(told))
    before = Ticks.now()
    since = Ticks.now() - before
    assert since == Ticks(busy=75, idle=110, stolen=25)
    assert since.withheld == 0.25


# ---- the command --------------------------------------------------------------------------------------


def test_a_quick_call_times_digits_and_keeps_nothing_in_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Window] = []

    def measured(wanted: list[Window], path: Path, state: str) -> list[Found]:
        assert path.parent == tmp_path
        asked.extend(wanted)
        return []

    monkeypatch.setattr(papers, "RUNS", tmp_path)
    monkeypatch.setattr(papers, "refuse_early", lambda cluster: None)
    monkeypatch.setattr(papers, "trained", lambda some: ROWS)
    monkeypatch.setattr(windows, "carry_out", measured)
    monkeypatch.setattr("sys.argv", ["papers.py", "daso", "--quick", "--links", "100mbit,30ms"])
    papers.main()
    assert [(each.run.recipe, each.run.cluster, each.blocks) for each in asked] == [
        (("digits",), "2x2@100mbit,30ms", 2)
    ]
    assert asked[0].algorithms == ("ddp", "fp16", "daso")
    assert "[DASO](daso.md)" in capsys.readouterr().out


@for_each(
    "words",
    [
        ["--links", "1gbit"],
        ["--quick", "--publish"],
        ["--quick", "--data", "x"],
        ["daso", "--publish"],
        ["x"],
    ],
)
def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr("sys.argv", ["papers.py", *words])
    with pytest.raises(SystemExit) as error:
        papers.main()
    assert error.value.code == 2


# ---- precisions ---------------------------------------------------------------------------------------


def test_what_is_held_in_a_precision_is_not_made_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit_lab.recipes.models.precision.is_native", lambda: False)
    held = [each.key for each in DASO.windows(replace(ON_IMAGES, precision="bf16"))]
    assert settled(ON_IMAGES, DASO.windows, held).precision == "bf16"
    assert settled(ON_IMAGES, DASO.windows, held[1:]).precision == "fp32", "not all, so where it is fast"
    assert set(PRECISIONS) == {
        word for each in (*held, *DASO.windows(ON_IMAGES)) for word in each.run.recipe if word in PRECISIONS
    }


def test_what_follows_the_length_is_that_of_the_training_that_is_timed() -> None:
    assert attached(DGC.held[0], "vgg11") == f"dgc:warmup_steps={9 * NETWORKS['vgg11'].steps}"
