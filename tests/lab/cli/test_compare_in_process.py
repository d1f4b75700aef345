"""`tacit compare --replicas in-process`: what ranks compute, without their seconds."""

import json
from pathlib import Path

import pytest

from in_process_command import called
from tacit_lab import records

IN_PROCESS = ("--replicas", "in-process", "--epochs", "1")
SCRIPT = str(Path(__file__).with_name("compared_script.py"))


def ends(folder: Path) -> list[records.EndRecord]:
    return [each for each in records.read(folder / "records.jsonl") if isinstance(each, records.EndRecord)]


def test_it_has_the_numbers_of_ranks(tmp_path: Path) -> None:
    words = ("compare", "digits", "--cluster", "local:2", "--algorithms", "ddp,topk", "--epochs", "1")
    for replicas in ("processes", "in-process"):
        done = called(*words, "--replicas", replicas, "--out", replicas, cwd=tmp_path)
        assert done.code == 0, done.err
    ranks, here = ends(tmp_path / "processes"), ends(tmp_path / "in-process")
    assert [each.algorithm for each in ranks] == ["ddp", "topk", "compute-only"]
    assert sorted(each.algorithm for each in here) == ["ddp", "topk"]
    for mine in here:
        theirs = next(each for each in ranks if each.algorithm == mine.algorithm)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)
        assert mine.training_loss == pytest.approx(theirs.training_loss, rel=1e-3)
        assert mine.accuracy == pytest.approx(theirs.accuracy, abs=0.006)
        assert mine.steps == theirs.steps


def test_seeds_and_rates_are_told_with_intervals_and_what_is_not_known_as_missing(tmp_path: Path) -> None:
    words = ("--cluster", "2x1@100mbit", "--algorithms", "ddp,topk", "--rates", "1,2", "--out", "out")
    done = called("compare", "digits", *IN_PROCESS, *words, "--seeds", "0..1", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    ddp, topk = told["rows"]
    assert [ddp["algorithm"], topk["algorithm"]] == ["ddp", "topk"], "whichever ended first"
    assert (told["cluster"], told["shaped"], told["in_process"]) == ("2x1", False, True)
    for row in (ddp, topk):
        for name in ("seconds", "mb_between_nodes", "speedup", "of_compute_only"):
            assert row[name] is None
    assert topk["gap"]["count"] == 2
    assert topk["gap"]["half"] is not None
    assert ddp["mb_by_count"] > 10 * topk["mb_by_count"] > 0
    assert topk["reduction"] == pytest.approx(1 - topk["mb_by_count"] / ddp["mb_by_count"])
    page = (tmp_path / "out" / "report.html").read_text()
    for text in (
        "±",
        "All replicas in one process: nothing is known",
        "against steps",
        "against MB by count",
    ):
        assert text in page
    assert 'data-column="seconds"' not in page
    assert 'data-column="MB between nodes"' not in page
    assert "training 1 of about 8" in done.err
    before = len(ends(tmp_path / "out"))
    again = called("compare", "digits", *IN_PROCESS, *words, "--seeds", "0..2", cwd=tmp_path)
    assert again.code == 0, again.err
    assert {each.seed for each in ends(tmp_path / "out")[before:]} == {2}
    other = called("compare", "digits", "--epochs", "1", "--cluster", "2x1", *words[2:], cwd=tmp_path)
    assert other.code == 2
    assert "holds the records of another comparison" in other.err
    paper = called("report", "out", "--latex", "t.tex", "--csv", "t.csv", cwd=tmp_path)
    assert paper.code == 0, paper.err
    table = (tmp_path / "t.tex").read_text()
    assert "MB by count" in table
    assert not any(word in table for word in ("seconds", "MB between nodes", "target"))


def test_what_does_not_fit_is_told_and_the_others_are_trained(tmp_path: Path) -> None:
    words = ("--cluster", "2x1", "--algorithms", "ddp,onebit-adam", "--out", "out")
    done = called("compare", "digits", *IN_PROCESS, *words, cwd=tmp_path)
    assert done.code == 1
    assert "onebit-adam failed: the strategy sends Adam's momentum, and SGD is neither" in done.err
    assert {each.algorithm: each.status for each in ends(tmp_path / "out")} == {
        "ddp": "ok",
        "onebit-adam": "failed",
    }


def test_a_limit_of_time_is_kept(tmp_path: Path) -> None:
    words = ("--cluster", "2x1", "--algorithms", "ddp", "--timeout", "0.01")
    done = called("compare", "digits", *IN_PROCESS, *words, cwd=tmp_path)
    assert done.code == 1
    assert "ddp failed: it was stopped after 0.01 s, see --timeout" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", SCRIPT, "well", "10"), "--replicas in-process is for recipes: a script decides itself"),
        (
            ("--algorithms", "ddp,auto"),
            "auto cannot be trained with all replicas in one process, as it chooses",
        ),
        (
            ("--algorithms", "ps"),
            "ps cannot be trained with all replicas in one process, as it needs a param",
        ),
        (("--algorithms", "ps-async"), "ps-async cannot be trained with all replicas in one process"),
        (("--algorithms", "adpsgd"), "as it has ranks that do not wait for each other"),
        (("--algorithms", "fusion"), "as it computes what dense does, and differs in time alone"),
        (("--algorithms", "uneven"), "as it goes by rates of links, which are measured"),
        (("--algorithms", "daso:period=auto"), "as it takes its period from how long its transfers take"),
        (("--servers", "1"), "--replicas in-process has no parameter servers: leave out the 1"),
        (("--tensorboard", "curves"), "--tensorboard curves is for replicas in processes"),
        (("--replicas", "inprocess"), "unknown kind of replicas 'inprocess'. Did you mean 'in-process'"),
    ],
)
def test_what_depends_on_a_network_is_refused_by_name(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = called("compare", "--replicas", "in-process", *words, cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not [*tmp_path.iterdir()]
