"""How ranks ended, as `tacit run` tells it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tacit import files
from tacit_lab.cli.run import failures, result
from tacit_lab.cli.run.failures import FailureGroup
from tacit_lab.cli.run.options import RunOptions
from tacit_lab.cluster import Cluster
from tacit_lab.testbed import Failure, Result
from tacit_lab.testbed.results import Ending

ATTACH = f"""Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    with tacit.attach(model, opt, alg) as s:
         ^^^^^^^^^^^^
  File "{Path(files.__file__).parent}/hooks/attach.py", line 129, in attach
    return Attached(
           ^^^^^^^^^
  File "<frozen runpy>", line 88, in _run_code
tacit.errors.AttachError: the strategy applies momentum: use torch.optim.SGD"""
LOST = """Traceback (most recent call last):
  File "/home/me/train.py", line 1, in <module>
    raise RuntimeError("of Gloo")
RuntimeError: of Gloo

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/train.py", line 22, in <module>
    loss.backward()
tacit.errors.PeerLost: rank 1 has left
in two lines"""


def alike(*ranks: int, traceback: str | None = ATTACH, reason: str = "exit code 1") -> list[Ending]:
    return [Ending(rank, rank // 2, reason, traceback) for rank in ranks]


def test_an_error_of_all_ranks_is_told_once() -> None:
    (group,) = failures.group_endings(alike(2, 0, 3, 1))
    assert group.ranks == (0, 1, 2, 3)
    assert group.who == "ranks 0, 1, 2 and 3"
    assert failures.format_groups([group], group.who) == [
        '  File "/home/me/train.py", line 12, in <module>',
        "    with tacit.attach(model, opt, alg) as s:",
        "         ^^^^^^^^^^^^",
        "tacit.errors.AttachError: the strategy applies momentum: use torch.optim.SGD",
    ]


def test_errors_that_differ_are_each_told_and_the_launchers_own_are_not() -> None:
    ended = [
        Ending(1, 0, "killed by SIGKILL"),
        *alike(0, 2, traceback=LOST),
        Ending(3, 1, "killed by SIGTERM", lost=True),
    ]
    groups = failures.group_endings(ended)
    assert groups[0] == FailureGroup((1,), "killed by SIGKILL")
    assert groups[1].error == ("tacit.errors.PeerLost: rank 1 has left", "in two lines")
    assert groups[1].frames == ('  File "/home/me/train.py", line 22, in <module>', "    loss.backward()")
    assert failures.format_groups(groups, "rank 1") == [
        "ranks 0 and 2: tacit.errors.PeerLost: rank 1 has left"
    ]
    assert failures.dragged_along(ended) == (3,)


def test_many_errors_are_cut() -> None:
    ended = [
        each
        for rank in range(9)
        for each in alike(
            rank, traceback=f"Traceback (most recent call last):\nValueError: {rank} {'x' * 9000}"
        )
    ]
    lines = failures.format_groups(failures.group_endings(ended), "rank 0")
    assert len(lines) == 5
    assert lines[-1] == "and 5 more ranks, each with another error"
    assert all(len(line) < 700 for line in lines)


def test_frames_of_the_library_are_shown_where_there_are_no_others() -> None:
    text = f'Traceback (most recent call last):\n  File "{Path(files.__file__)}", line 1, in f\n    f()\nE: 1'
    (group,) = failures.group_endings(alike(0, traceback=text))
    assert group.frames == (f'  File "{Path(files.__file__)}", line 1, in f', "    f()")


@pytest.mark.parametrize("text", ["", "no traceback", "Traceback (most recent call last):", "E: 1\n  E: 2"])
def test_odd_tracebacks_are_no_error(text: str) -> None:
    (group,) = failures.group_endings(alike(0, traceback=text))
    failures.format_groups([group], "rank 0")


def test_every_traceback_is_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended = [*alike(10, 2), Ending(1, 0, "killed by SIGKILL")]
    assert failures.write_tracebacks(ended, tmp_path / "errors") == ["rank2.txt", "rank10.txt"]
    assert (tmp_path / "errors" / "rank10.txt").read_text() == ATTACH + "\n"
    assert failures.write_tracebacks([], tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    assert failures.write_tracebacks(ended, tmp_path / "gone" / "errors") == []
    assert "tracebacks are not saved" in capsys.readouterr().err


def summary(tmp_path: Path, ended: Result) -> list[str]:
    options = RunOptions(
        script=("train.py",), cluster=Cluster.parse("2x2"), strategy=None, timeout=None, folder=tmp_path
    )
    return result.summarize(options, ended).lines()


def test_the_summary_names_what_was_attached(tmp_path: Path) -> None:
    options = RunOptions(
        script=("train.py",), cluster=Cluster.parse("2x2"), strategy=None, timeout=None, folder=tmp_path
    )
    told = result.summarize(options, Result(0, (), False, 1.0))
    assert told.lines()[0] == "ddp on 2x2: train.py"
    assert replace(told, attached=("topk:ratio=0.01",)).lines()[0] == "topk:ratio=0.01 on 2x2: train.py"


def test_the_summary_names_who_failed_first(tmp_path: Path) -> None:
    together = Result(1, (Failure(0, 2, "exit code 1", ATTACH, 1),), False, 1.0, (), tuple(alike(0, 1, 2, 3)))
    lines = summary(tmp_path, together)
    assert lines[0] == "tacit: train.py failed: ranks 0, 1, 2 and 3 ended with exit code 1"
    assert "train.py on 2x2; no rank could write what it had attached" in lines
    assert lines[4].startswith("tacit.errors.AttachError")
    assert lines[5].startswith("Whole tracebacks: errors/rank0.txt, errors/rank1.txt")
    assert len(lines) < 14
    frozen = Failure(0, 1, "froze: it did not answer in round 20")
    survivors = Failure(0, 0, "exit code 1", LOST, 1)
    lines = summary(
        tmp_path, Result(1, (frozen, survivors), False, 1.0, (), tuple(alike(0, 2, traceback=LOST)))
    )
    assert lines[0] == "tacit: train.py failed: rank 1 froze: it did not answer in round 20 (node 0)"
    assert "(ranks 0 and 2 ended so)" in lines
    infected = Failure(1, 2, "had NaN or infinity in the gradient of 0.weight, in step 5", ATTACH, 1)
    lines = summary(tmp_path, Result(1, (infected,), False, 1.0, (), tuple(alike(0, 1, 2, 3))))
    assert lines[0] == (
        "tacit: train.py failed: rank 2 had NaN or infinity in the gradient of 0.weight, in step 5 (node 1)"
    )
    launcher = Failure(1, None, "exit code 1", "cannot bind", 1)
    lines = summary(tmp_path, Result(1, (launcher,), False, 1.0))
    assert lines[:2] == [
        "tacit: train.py failed: the launcher of node 1 ended with exit code 1",
        "cannot bind",
    ]
