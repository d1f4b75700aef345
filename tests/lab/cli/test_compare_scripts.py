"""`tacit compare` of a script: what it makes of reports, and what is wrong with scripts."""

import json
import shutil
from pathlib import Path

import pytest

from forks import COMMAND, ran
from in_process_command import called
from tacit_lab import records

SCRIPT = Path(__file__).with_name("compared_script.py")
EXAMPLES = Path(__file__).parents[3] / "examples"
TWO = ("--cluster", "local:2", "--algorithms", "ddp,topk")


def test_a_script_and_a_method_of_ones_own_seed_by_seed(namespaces: None, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "my_rows.py", tmp_path)
    words = ("--cluster", "2x1@1gbit", "--algorithms", "ddp,mine", "--import", "my_rows", "--seeds", "0..1")
    more = ("--out", "out", "--json", "--", str(SCRIPT), "well", "20")
    done = ran("-u", COMMAND, "tacit", "compare", *words, *more, cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    ddp, mine = told["rows"]
    assert (told["seeds"], told["recipe"]) == ([0, 1], f"{SCRIPT} well 20")
    assert mine["gap"]["count"] == 2
    assert mine["loss"] != ddp["loss"]
    assert ddp["gap"] is None
    assert 0 < mine["mb_between_nodes"] < ddp["mb_between_nodes"]
    assert told["compute_only_seconds"] > 0
    assert ddp["seconds"] > 0
    found = [*records.read(tmp_path / "out" / "records.jsonl")]
    steps = [each.step for each in found if isinstance(each, records.EpochRecord)]
    assert steps == [5, 10, 15, 20] * 5  # two algorithms with two seeds, and one run without communication
    weights = {(each.seed, each.weights) for each in found if isinstance(each, records.RunRecord)}
    assert len(weights) == 2
    assert not [
        each for each in ("different weights", "ignores its seed", "number of steps") if each in done.err
    ]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "±" in page
    assert "traces" in done.err


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    words = ("--out", "out", "--", str(SCRIPT), "well", "10")
    first = called("compare", "--cluster", "local:2", "--algorithms", "ddp", *words, cwd=tmp_path)
    assert first.code == 0, first.err
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["algorithm"] for line in lines[-4:]] == ["compute-only"] * 4
    (tmp_path / "out" / "records.jsonl").write_text("\n".join(lines[:-1]) + "\n")  # killed before its end
    again = called("compare", *TWO, *words, cwd=tmp_path)
    assert again.code == 0, again.err
    assert [line for line in again.err.splitlines() if "launching" in line] == [
        "topk: launching, training 2 of 3",
        "compute-only: launching, training 3 of 3",
    ]
    found = [*records.read(tmp_path / "out" / "records.jsonl")]
    ends = [each.algorithm for each in found if isinstance(each, records.EndRecord)]
    assert ends == ["ddp", "topk", "compute-only"]
    other = called("compare", *TWO, *words[:-1], "11", cwd=tmp_path)
    assert other.code == 2
    assert "holds the records of another comparison" in other.err


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        ("never reports", (), "never called tacit.report, so there is nothing to compare"),
        ("never asks", ("--seeds", "0..1"), "--seeds would do nothing, as"),
        ("never asks", ("--rates", "0.5,1"), "--rates would do nothing, as"),
        ("other names", (), "ddp reported loss, and topk accuracy and loss"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, how: str, options: tuple[str, ...], message: str
) -> None:
    done = called("compare", *TWO, *options, "--", str(SCRIPT), how, "10", cwd=tmp_path)
    assert done.code == 2, done.err
    assert message in done.err


@pytest.mark.parametrize(
    ("how", "options", "note"),
    [
        ("unseeded", (), "With seed 0, ddp and topk began with different weights"),
        ("ignores", ("--seeds", "0..1"), "the script ignores its seed"),
        ("short", (), "did not take the same number of steps: ddp 20, topk 10, compute-only 20"),
    ],
)
def test_what_speaks_against_a_comparison_is_said(
    tmp_path: Path, how: str, options: tuple[str, ...], note: str
) -> None:
    words = ("--out", "out", "--", str(SCRIPT), how, "20")
    done = called("compare", *TWO, *options, *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert note in " ".join(done.out.split())
    assert note in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--epochs", "3", "--", str(SCRIPT)), "--epochs is for recipes"),
        (("--limit", "3", "--", str(SCRIPT)), "--limit is for recipes"),
        (("--download", "--", str(SCRIPT)), "--download is for recipes"),
        (("--", "nowhere.py"), "there is no script 'nowhere.py'"),
        (("digits", "mnist"), "'mnist' follows the recipe digits"),
        (("--seeds", "3..1"), "is no list of seeds"),
        (("--seeds", "1,1"), "is no list of seeds"),
        (("--seeds", "0..1000000"), "is no list of seeds"),
        (("--seeds", "1000"), "is the seed by which rates are chosen"),
        (("--rates", "0"), "write numbers from 1/1024 to 16"),
        (("--rates", "-1,2"), "is no list of numbers"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = called("compare", *words, cwd=tmp_path)
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert not [*tmp_path.iterdir()]


def test_a_script_that_never_closes_its_session_is_compared(tmp_path: Path) -> None:
    done = called("compare", *TWO, "--json", "--", str(SCRIPT), "never closes", "10", cwd=tmp_path)
    assert done.code == 0, done.err
    assert [row["loss"] for row in json.loads(done.out)["rows"]] == [1.0, 1.0]


def test_a_script_that_fails_says_where(tmp_path: Path) -> None:
    done = called("compare", *TWO, "--out", "out", "--", str(SCRIPT), "breaks", "10", cwd=tmp_path)
    assert done.code == 1
    assert "ddp failed: " in done.err
    assert "ValueError: broken by its author" in done.err
    assert 'raise ValueError("broken by its author")' in done.err
    assert "ValueError" in (tmp_path / "out" / "errors" / "rank0.txt").read_text()
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "comparison.json",
        "errors",
        "records.jsonl",
        "report.html",
    ]
