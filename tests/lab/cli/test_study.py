"""`tacit study`: gaps against steps and bytes, in one command that goes on where it was."""

import json
from pathlib import Path

import pytest

from in_process_command import called


def test_a_study_is_a_table_a_page_and_goes_on(tmp_path: Path) -> None:
    words = ("--steps", "3,5", "--algorithms", "topk", "--jobs", "1", "--quick", "--out", "out", "--json")
    done = called("study", "digits", *words, "--seeds", "0..1", cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [(row["arm"], row["steps"]) for row in told["rows"]] == [
        ("dense", 3),
        ("topk", 3),
        ("dense", 5),
        ("topk", 5),
    ]
    topk = told["rows"][1]
    assert topk["gap"]["count"] == 2
    assert 0.01 < topk["bytes"] < 0.05
    assert "Note: Two seeds: an interval of two pairs says next to nothing" in done.err
    assert "gap: to plain training, paired by seed" in done.err
    (dense,) = {line.split()[-1] for line in done.err.splitlines() if line.startswith("dense  ")}
    assert dense == "–"
    assert told["command"] == f"tacit study digits {' '.join(words)} --seeds 0..1"
    assert "5 steps" in (tmp_path / "out" / "study.html").read_text()
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 8
    again = called("study", "digits", *words, "--seeds", "0..2", cwd=tmp_path)
    assert again.code == 0, again.err
    assert sum(", seed " in line for line in again.err.splitlines()) == 4, "the third seed alone is trained"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nonsense",), "unknown recipe 'nonsense'"),
        (("--algorithms", "ps"), "ps cannot be trained with all replicas in one process"),
        (("--algorithms", "auto"), "auto cannot be trained with all replicas in one process"),
        (("--steps", "0"), "--steps 0 must be 2 or more"),
        (("--steps", "many"), "is no list of numbers"),
        (("--rates", "0"), "write numbers from 1/1024 to 16"),
        (("--rates", "32"), "write numbers from 1/1024 to 16"),
        (("--seeds", "1000"), "is the seed by which rates are chosen"),
        (("--minutes", "0"), "--minutes 0"),
        (("--limit", "9"), "--limit would do nothing for digits"),
        (("cifar10",), "--data PATH"),
        (("--cluster", "2x1", "digits"), "--cluster 2x1 is for scripts"),
        (("--limit", "3", "--", __file__), "--limit is for recipes"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = called("study", *words, cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not [*tmp_path.iterdir()]


def test_a_script_is_studied_on_a_cluster(namespaces: None, tmp_path: Path) -> None:
    words = ("--steps", "5,10", "--algorithms", "topk:ratio=0.1", "--seeds", "0..1", "--quick")
    script = Path(__file__).with_name("compared_script.py")
    more = ("--cluster", "2x1@1gbit", "--out", "out", "--json", "--", str(script), "well", "99")
    done = called("study", *words, *more, cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert [(row["arm"], row["steps"]) for row in told["rows"]] == [
        ("dense", 5),
        ("topk:ratio=0.1", 5),
        ("dense", 10),
        ("topk:ratio=0.1", 10),
    ]
    assert all(row["by_loss"] and row["on_cluster"] and row["seconds"] > 0 for row in told["rows"])
    assert 0 < told["rows"][1]["bytes"] < 1 == told["rows"][0]["bytes"]
    again = called("study", *words, *more, cwd=tmp_path)
    assert ", seed " not in again.err, "nothing is left to train"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("never asks", "--steps would do nothing, as"),
        ("never reports", "never called tacit.report"),
        ("short", "train for tacit.trial().steps"),
    ],
)
def test_a_script_that_cannot_be_studied_is_refused(tmp_path: Path, how: str, message: str) -> None:
    script = Path(__file__).with_name("compared_script.py")
    words = ("--cluster", "local:2", "--steps", "10", "--algorithms", "topk", "--quick", "--seeds", "0")
    done = called("study", *words, "--", str(script), how, "10", cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())


def test_what_nothing_came_of_is_an_error(tmp_path: Path) -> None:
    words = ("--steps", "3", "--algorithms", "topk", "--quick", "--minutes", "0.000001", "--out", "out")
    done = called("study", "digits", *words, "--seeds", "0", cwd=tmp_path)
    assert done.code == 1
    assert "nothing came of" in done.err
    assert "topk of 3 steps: its lines above say why, or --minutes were over" in done.err
