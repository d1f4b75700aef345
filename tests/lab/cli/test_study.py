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
    assert "5 steps" in (tmp_path / "out" / "study.html").read_text()
    assert len((tmp_path / "out" / "runs.jsonl").read_text().splitlines()) == 8
    again = called("study", "digits", *words, "--seeds", "0..2", cwd=tmp_path)
    assert again.code == 0, again.err
    assert sum(", seed " in line for line in again.err.splitlines()) == 4, "the third seed alone is trained"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nonsense",), "unknown recipe 'nonsense'"),
        (("--algorithms", "ps"), "ps does not train in one process"),
        (("--algorithms", "auto"), "auto does not train in one process"),
        (("--steps", "0"), "--steps 0 must be 2 or more"),
        (("--steps", "many"), "is no list of numbers"),
        (("--rates", "0"), "write numbers from 1/1024 to 16"),
        (("--rates", "32"), "write numbers from 1/1024 to 16"),
        (("--seeds", "1000"), "is the seed by which rates are chosen"),
        (("--minutes", "0"), "--minutes 0"),
        (("--limit", "9"), "--limit would do nothing for digits"),
        (("cifar10",), "--data PATH"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = called("study", *words, cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not [*tmp_path.iterdir()]
