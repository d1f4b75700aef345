"""What a paper's page says of what was measured, and of which runs and windows an experiment is made."""

from dataclasses import replace
from pathlib import Path

import pytest

import mp2
import mp2_page
import papers
import tacit
import windows
from cases import for_each
from experiments import DASO, DGC, EXPERIMENTS, NETWORKS, PRECISIONS, Scale, runs, settled, whole_runs
from experiments import windows as windows_of
from grid import COMPUTE_ONLY, Done, Run
from paired import Ticks
from paper_page import Evidence, label_of, page
from tacit import algorithms
from windows import Found, Part, Window, parts, plan

MACHINE = {"date": "2026-01-02", "cpu": "a CPU", "cores": 2, "kernel": "6", "python": "3", "torch": "2",
           "commit": "abc"}  # fmt: skip
ON_IMAGES = Scale(data="/somewhere/cifar10-jpeg-q75.tar.xz")


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


def test_a_sparse_warm_up_is_measured_by_itself() -> None:
    found = parts("dgc:ratio=0.01,warmup_steps=40", 2, 100)
    assert [part.text for part in found] == [
        "dgc:ratio=0.01", "dgc:ratio=0.25", "dgc:ratio=0.0625", "dgc:ratio=0.015625", "dgc:ratio=0.01",
    ]  # fmt: skip
    assert [part.share for part in found] == pytest.approx([0.8, 0.05, 0.05, 0.05, 0.05])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_all_parts_of_all_experiments_can_be_attached_and_add_up(name: str) -> None:
    for window in windows_of(EXPERIMENTS[name], ON_IMAGES):
        for algorithm in window.algorithms:
            found = parts(algorithm, 8, 78)
            assert sum(part.share for part in found) == pytest.approx(1.0)
            for part in found:
                algorithms.parse(part.text)


def test_windows_hold_few_algorithms_and_always_the_baseline() -> None:
    run = Run(("digits",), "", "2x2@100mbit")
    names = ["ddp", *(f"powersgd:rank={rank}" for rank in range(1, 18))]
    found = plan(run, names, 2)
    assert [window.algorithms[0] for window in found] == ["ddp"] * 3
    assert sorted({each for window in found for each in window.algorithms}) == sorted(names)
    assert max(len(window.algorithms) for window in found) <= windows.TOGETHER
    assert plan(run, ["ddp"], 2) == [Window(run, ("ddp",), 2)]


def test_times_alone_are_of_one_cluster_whose_links_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Window] = []
    monkeypatch.setattr(papers, "RUNS", tmp_path)
    monkeypatch.setattr(papers, "refuse_early", lambda _: None)
    monkeypatch.setattr(windows, "carry_out", lambda some, _: asked.extend(some))
    monkeypatch.setattr("sys.argv", ["papers.py", "daso", "--quick", "--times", "--links", "100mbit,30ms"])
    papers.main()
    (window,) = asked
    assert window.run.cluster == "2x2@100mbit,30ms"
    assert window.algorithms == ("ddp", "fp16", DASO)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setattr("sys.argv", ["papers.py", "daso", "--times"])
    with pytest.raises(SystemExit):
        papers.main()


def test_windows_are_not_measured_again_but_for_failures(tmp_path: Path) -> None:
    first, second = plan(Run(("digits",), "", "2x2@100mbit"), [f"powersgd:rank={i}" for i in range(1, 10)], 2)
    asked: list[Window] = []

    def measure(window: Window) -> Found:
        asked.append(window)
        if window == second and len(asked) < 3:
            return Found(window, 22, {}, MACHINE, "no luck")
        return Found(window, 22, {each: [(1.0, [0.1, 0.3], 2.0)] for each in window.algorithms}, MACHINE)

    path = tmp_path / "w.jsonl"
    assert [found.error for found in windows.carry_out([first, second], path, measure)] == [None, "no luck"]
    found = windows.carry_out([first, second], path, measure)
    assert asked == [first, second, second]
    assert [each.seconds(each.window.algorithms[1]) for each in found] == [0.2, 0.2]


def test_a_step_of_a_run_is_the_mean_over_its_parts() -> None:
    window = Window(Run(("digits",), "", "2x2"), ("ddp",), 2)
    found = Found(window, 22, {"x": [(0.75, [1.0, 3.0, 2.0], 8.0), (0.25, [10.0], 4.0)]}, MACHINE)
    assert found.seconds("x") == pytest.approx(0.75 * 2 + 0.25 * 10)
    assert found.megabytes("x") == pytest.approx(7.0)
    assert found.steady("x") == (2.0, 8.0)
    assert Found.from_json(found.to_json()).seconds("x") == found.seconds("x")


# ---- experiments --------------------------------------------------------------------------------------


@for_each("name", EXPERIMENTS)
@for_each("scale", [ON_IMAGES, Scale(), Scale(2, 2, quick=True)], ids=["images", "none", "quick"])
def test_whole_runs_are_runs_on_a_shaped_link(name: str, scale: Scale) -> None:
    experiment = EXPERIMENTS[name]
    asked = {run.key for run in runs(experiment, scale)}
    assert {run.seed for run in asked} == set(range(scale.seeds))
    whole = [run.algorithm.partition(":")[0] for run in whole_runs(experiment, scale)]
    assert sorted(whole) == sorted({each.partition(":")[0] for each in experiment.algorithms}), "each once"
    for run in whole_runs(experiment, scale):
        cluster, _, rate = run.cluster.partition("@")
        assert rate
        assert replace(run.key, cluster=cluster) in asked, "there is a run on fast links to compare with"
        algorithms.parse(run.algorithm)
        steps = next(each.steps for each in NETWORKS.values() if each.words[0] == run.recipe[0])
        if not scale.quick:
            assert steps * (run.epochs or 0) >= 200


def test_claims_are_of_algorithms_that_are_compared() -> None:
    for experiment in EXPERIMENTS.values():
        for claim in experiment.claims:
            assert {claim.algorithm, *claim.against} <= set(experiment.algorithms)


# ---- pages --------------------------------------------------------------------------------------------


def evidence(quick: bool = False, error: str | None = None) -> Evidence:
    """DASO takes 0.5 s a step where ddp takes 1 s, and wins a point of accuracy in each of three seeds."""
    experiment = EXPERIMENTS["daso"]
    wanted = runs(experiment, ON_IMAGES)

    def done(run: Run) -> Done:
        accuracy = 0.4 + run.seed / 100 + 0.01 * run.algorithm.startswith("daso")
        return Done(run.key, "ok", accuracy=accuracy, seconds=1.0, steps=390, megabytes=1.0, hardware=MACHINE)

    whole = [replace(done(run), seconds=390 * (0.52 if "daso" in run.algorithm else 1.2))
             for run in whole_runs(experiment, ON_IMAGES)]  # fmt: skip
    found = [
        Found(
            window.key,
            78,
            {
                COMPUTE_ONLY: [(1.0, [0.3], 0.0)],
                "ddp": [(1.0, [1.0, 0.9, 1.1], 1.5)],
                "fp16": [(1.0, [0.8, 0.8, 0.8], 0.75)],
                DASO: [(0.75, [0.4, 0.4, 0.4], 0.1), (0.25, [0.8], 0.5)],
            },
            MACHINE,
            error,
        )
        for window in windows_of(experiment, ON_IMAGES)
    ]
    made = [done(run) for run in wanted]
    made[-1] = Done(wanted[-1].key, "failed", error="rank 1 was lost\nat length", hardware=MACHINE)
    return Evidence(made, len(wanted), whole, found, "python benchmarks/papers.py daso", quick)


def test_a_claim_stands_next_to_what_was_measured() -> None:
    text = page(EXPERIMENTS["daso"], evidence())
    lines = [line for line in text.splitlines() if "up to 34 %" in line]
    assert len(lines) == 8, "four windows, two rivals"
    assert (
        "50.0% less time (without warm-up 60.0% less, by blocks 55.6% to 63.6% less) | +16.0 points |"
        in lines[0]
    )
    assert (
        "37.5% less time (without warm-up 50.0% less, by blocks 50.0% to 50.0% less) | +3.5 points |"
        in lines[4]
    )
    assert "a CPU, 2 cores" in text
    assert "abc" in text
    assert "CIFAR-10 (JPEG q75), vgg11-narrow, bf16, 10000 images, 5 epochs" in text


def test_accuracies_stand_with_their_interval() -> None:
    text = page(EXPERIMENTS["daso"], evidence())
    rows = [line for line in text.splitlines() if "`daso" in line and "+1.00" in line]
    assert rows
    assert all("+1.00 ± 0.00" in row for row in rows)
    assert any("| 0.4100 | 0.4200 |" in row for row in rows)


def test_time_that_is_lost_and_a_range_that_is_met_read_as_such() -> None:
    made = evidence()
    slow = {**made.found[0].parts, DASO: [(1.0, [1.2, 1.2, 0.9], 0.005)]}
    slower = replace(made, found=[replace(made.found[0], parts=slow)])
    assert "20.0% more time (by blocks 33.3% more to 18.2% less) | -54.0 points |" in page(
        EXPERIMENTS["daso"], slower
    )
    dgc = DGC.replace("{epoch}", "78")
    sent = {"ddp": [(1.0, [1.0], 3.0)], dgc: [(0.8, [1.0], 0.01), (0.2, [1.0], 0.11)]}
    text = page(EXPERIMENTS["dgc"], replace(made, found=[replace(made.found[0], parts=sent)]))
    assert "| 300 times fewer without warm-up, 100 with it | within |" in text


def test_whole_runs_are_judged_by_their_windows() -> None:
    text = page(EXPERIMENTS["daso"], evidence())
    section = text.partition("## Whole runs")[2]
    ddp = next(line for line in section.splitlines() if line.startswith("| `ddp`"))
    daso = next(line for line in section.splitlines() if line.startswith("| `daso"))
    assert "| 390 | 390.0 | 468.0 | 1.200 | **no** |" in ddp
    assert "| 390 | 195.0 | 202.8 | 1.040 | yes |" in daso


def test_a_quick_page_judges_nothing() -> None:
    text = page(EXPERIMENTS["daso"], evidence(quick=True))
    assert "It judges nothing" in text
    assert "| yes |" not in text
    assert "**no**" not in text


def test_failures_are_on_the_page() -> None:
    text = page(EXPERIMENTS["daso"], evidence(error="a window broke"))
    assert "rank 1 was lost" in text
    assert "at length" not in text
    assert "a window broke" in text


def test_the_algorithm_of_a_claim_is_found_whatever_an_epoch_has() -> None:
    from paper_page import _same

    assert _same("dgc:ratio=0.001,warmup_steps=22", DGC)
    assert not _same("dgc:ratio=0.001", DGC)
    assert not _same("daso", DASO)


def test_without_figures_the_page_says_so() -> None:
    assert "None of the paper's figures" in page(EXPERIMENTS["diloco"], evidence())


def test_a_page_says_when_each_part_was_made_and_what_has_no_times() -> None:
    made = evidence()
    later = {**MACHINE, "date": "2026-02-03", "commit": "def+"}
    made = replace(made, found=[replace(each, hardware=later) for each in made.found])
    text = page(EXPERIMENTS["daso"], made)
    assert "training runs, of 2026-01-02, at abc; 4 windows, of 2026-02-03, at def+" in text
    assert "Accuracy only" not in text
    assert "CIFAR-10 was not there" not in text
    bare = replace(made, found=made.found[:1])
    assert "* Accuracy only, no times: CIFAR-10 (JPEG q75), resnet8" in page(EXPERIMENTS["daso"], bare)
    none = replace(made, done=[Done(Run(("digits",), "ddp", "2x2"), "ok", hardware=MACHINE)])
    assert "CIFAR-10 was not there" in page(EXPERIMENTS["daso"], none)


def test_a_whole_run_is_not_held_against_windows_of_another_machine() -> None:
    made = evidence()
    older = {**MACHINE, "kernel": "5"}
    whole = [replace(each, hardware=older) for each in made.whole]
    text = page(EXPERIMENTS["daso"], replace(made, whole=whole))
    assert "| 1.200 | another machine |" in text
    assert "**no**" not in text


def test_a_page_says_of_which_windows_the_processors_were_withheld() -> None:
    made = evidence()
    assert "withheld" not in page(EXPERIMENTS["daso"], made)
    first, second, *others = made.found
    found = [replace(first, withheld=0.3), replace(second, withheld=0.01), *others]
    text = page(EXPERIMENTS["daso"], replace(made, found=found))
    setting = f"{label_of(first.window.run)} on {first.window.run.cluster}"
    assert f"Of the processors' time the hypervisor withheld 30% ({setting}); of 2 it is not known." in text


def test_withheld_is_a_share_of_the_time_with_work(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(["cpu  100 0 50 800 10 0 5 20 0 0\ncpu0 1 2", "cpu  150 5 60 900 20 5 10 45 0 0\ncpu0 1 2"])
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: next(told))
    before = Ticks.now()
    since = Ticks.now() - before
    assert since == Ticks(busy=75, idle=110, stolen=25)
    assert since.withheld == 0.25


# ---- MP2 ----------------------------------------------------------------------------------------------


def test_mp2_is_held_to_its_claims() -> None:
    row = {"task": "digits", "cluster": mp2.FAST, "epochs": 6, "arm": "mp2", "attached": "mp2", "seeds": 3,
           "accuracy": 0.98, "baseline_accuracy": 0.99, "difference": -0.01, "half_interval": 0.02,
           "bytes": 0.1, "time": 0.6}  # fmt: skip
    slow = {**row, "cluster": mp2.SLOW, "seeds": 1, "half_interval": None}
    other = {**row, "arm": "ps-topk", "attached": "ps-topk:ratio=0.033"}
    done = [Done(Run(("digits",), "mp2", mp2.FAST), "ok", hardware=MACHINE),
            Done(Run(("digits",), "ps-topk", mp2.FAST), "failed", error="gone\nat length")]  # fmt: skip
    text = mp2_page.page("a command", [row, slow, other], done, 0.99, {"of_plain_step": 0.04}, mp2.SLOW)
    claims, _, rest = text.partition("## Accuracy")
    assert "| up to 88.98 % less traffic | `mp2` | digits, 4x1@1gbit | 90.0% less | +1.0 points |" in claims
    assert "| up to 47.32 % less training time | `mp2` | digits, 4x1@100mbit | 40.0% less | -7.3" in claims
    assert "| -1.00 ± 2.00 points | -1.00 points |" in claims
    assert "topk" not in claims
    assert "`ps-topk:ratio=0.033` | 10.0%" in rest
    assert "Communication is 99% of a step" in rest
    assert "4.0% of one" in rest
    assert "gone" in rest
    assert "at length" not in rest


@pytest.mark.parametrize("native", [True, False])
def test_mp2s_networks_are_those_of_the_other_papers(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.setattr("tacit_lab.recipes.models.precision.is_native", lambda: native)
    assert [task.name for task in mp2.tasks(None)] == ["digits"]
    found = mp2.tasks(Path("/somewhere/cifar10-jpeg-q75.tar.xz"))
    fast = "bf16" if native else "fp32"
    networks = [f"{name}, {fast}" for name in ("resnet8", "vgg11-narrow", "alexnet")]
    assert [task.name for task in found] == ["digits", *networks]
    for task in found:
        for arm in ("ps", *task.arms):
            algorithms.parse(task.run(arm, mp2.FAST, 0).algorithm)


def test_mp2s_arms_are_what_they_stand_for() -> None:
    for task in mp2.tasks(Path("/somewhere/cifar10-jpeg-q75.tar.xz")):
        level = {arm: algorithms.parse(task.run(arm, mp2.FAST, 0).algorithm).levels[0] for arm in task.arms}
        # WNN leaps five times or more, and trains on.
        wnn = task.run("wnn", mp2.FAST, 0)
        nowcast, steps = level["wnn"].compressor, (wnn.epochs or 0) * task.steps
        assert isinstance(nowcast, tacit.prediction.Nowcast)
        leaps = steps // (5 * nowcast.period)
        assert leaps >= 5
        assert steps - leaps * 5 * nowcast.period >= steps // 30
        # DGC warms up, and is not masked.
        dgc = level["ps-dgc"].compressor
        assert isinstance(dgc, tacit.compressors.Scheduled)
        assert dgc.changes[-1] == max(4, task.epochs * task.steps // 20)
        assert isinstance(dgc.then, tacit.compressors.MomentumCorrection)
        assert not dgc.then.masking
        # Local SGD, and quantized gradients, that say as little.
        assert level["localsgd"].rounds == tacit.Every(9)
        assert isinstance(level["qsgd"].compressor, tacit.compressors.QSGD)


def test_runs_of_other_arms_are_not_taken_for_mp2s() -> None:
    assert mp2.FILE != "mp2-runs.jsonl"
    assert "mp2-runs.jsonl" in mp2_page.page("a command", [], [], None, {}, mp2.SLOW)


# ---- precisions ---------------------------------------------------------------------------------------


def test_what_is_held_in_a_precision_is_not_made_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit_lab.recipes.models.precision.is_native", lambda: False)
    experiment = EXPERIMENTS["daso"]

    def wanted(scale: Scale) -> list[Run]:
        return runs(experiment, scale)

    held = [run.key for run in wanted(ON_IMAGES)]
    assert settled(ON_IMAGES, wanted, held).precision == "bf16"
    assert settled(ON_IMAGES, wanted, held[1:]).precision == "fp32", (
        "not all, so that it is made where it is fast"
    )
    assert {"bf16", "fp32"} == {word for run in (*held, *wanted(replace(ON_IMAGES, precision="fp32")))
                                for word in run.recipe if word in PRECISIONS}  # fmt: skip


def test_the_page_says_where_accuracies_and_times_are_of_different_precisions() -> None:
    found = evidence()
    assert "different precisions" not in page(EXPERIMENTS["daso"], found)
    experiment = EXPERIMENTS["daso"]
    in_fp32 = whole_runs(experiment, replace(ON_IMAGES, precision="fp32"))
    whole = [replace(each, run=run.key) for each, run in zip(found.whole, in_fp32, strict=True)]
    text = page(experiment, replace(found, whole=whole))
    assert "different precisions" in text
    assert "Accuracy only" not in text
