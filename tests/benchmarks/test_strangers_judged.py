"""How benchmarks/strangers.py judges: what is wrong is found, and is said of the attack that it came with."""

from __future__ import annotations

import pytest

from fault_runs import MARK
from strangers import Row, blame, judge, page, reasons, wrong_alone


def test_what_marks_a_benchmarks_processes_is_no_variable_of_tacits() -> None:
    assert not MARK.startswith("TACIT_"), "TACIT_TRIAL ended workers that `tacit compare` had not started"


def row(attack: str = "garbage", opened: int = 3, ended: int = 3, begun: int = 0) -> Row:
    return Row("ps", attack, 0, opened, ended, (begun, begun + 10))


def test_an_attack_that_did_nothing_has_nothing_wrong() -> None:
    assert judge(row(), True, True, True, 3.0) == []


@pytest.mark.parametrize(
    ("made", "rest", "says"),
    [
        (row(opened=0, ended=0), (True, True, True, 0.0), "nothing was delivered"),
        (row(ended=1), (True, True, True, 0.0), "2 of 3 connections are still open"),
        (row(), (False, True, True, 0.0), "the server is gone"),
        (row(), (True, False, True, 0.0), "the workers do not train on"),
        (row(), (True, True, False, 0.0), "nobody is let in any more"),
        (row(), (True, True, True, 999.0), "the server has needed 999 MB more"),
    ],
)
def test_each_thing_that_is_wrong_is_said(made: Row, rest: tuple[bool, bool, bool, float], says: str) -> None:
    assert judge(made, *rest) == [says]


def test_where_connections_may_stay_that_is_not_wrong() -> None:
    assert judge(row("idle", ended=1), True, True, True, 0.0) == []


def test_other_parameters_are_the_fault_of_the_last_attack_before() -> None:
    rows = [row(begun=0), row("http", begun=2), row("tls", begun=4)]
    plain = [["a", "b", "c", "d", "e"]] * 2
    blame(rows, plain, plain)
    assert not any(each.wrong for each in rows)
    blame(rows, [["a", "b", "c", "x", "y"], plain[1]], plain)
    assert [bool(each.wrong) for each in rows] == [False, True, False]
    assert rows[1].wrong == ["wrong result: from step 3 on parameters are not what they are without attacks"]


def test_steps_that_are_missing_are_said() -> None:
    rows = [row()]
    blame(rows, [["a"], ["a", "b"]], [["a", "b"]] * 2)
    assert rows[0].wrong == ["[1, 2] steps, without attacks 2"]


def test_alone_all_pushes_are_counted_and_the_loss_falls() -> None:
    falls = [("sum", 2.0 - i / 100) for i in range(100)]
    ends = [{"steps": 100}] * 2
    assert wrong_alone(ends, 202, [falls, falls]) == []
    assert wrong_alone(ends, 203, [falls, falls]) == ["202 pushes were made, and the server has counted 203"]
    assert wrong_alone(ends[:1], 101, [falls, falls]) == ["1 of 2 workers came to the end"]
    (said,) = wrong_alone(ends, 202, [falls, [("sum", 2.0 + i / 100) for i in range(100)]])
    assert said.startswith("worker 1 ends with a loss of")


SAID = """
[server 0] tacit.stores.server: a connection from 127.0.1.7:40022 was closed: it speaks otherwise
tacit.stores.server: 10 connections from 127.0.1.7 were closed, the last (127.0.1.7:40031): it went away
tacit.stores.server: a connection from 127.0.1.71:40022 was closed: of somebody else
"""


def test_what_the_server_says_is_found_by_the_address() -> None:
    assert reasons(SAID, "127.0.1.7") == ["it speaks otherwise", "it went away"]


def test_the_page_has_a_row_for_each_attack() -> None:
    bad = row("http")
    bad.wrong.append("the server | is gone")
    text = page([row(), bad], "here.")
    assert "2 attacks, made 2 times, 1 times with something wrong. here." in text
    assert (
        "| ps | garbage | Random bytes, of many lengths (without the secret) | 3 | 3 | 0..10 | nothing | ok |"
        in text
    )
    assert "the server \\| is gone |" in text
