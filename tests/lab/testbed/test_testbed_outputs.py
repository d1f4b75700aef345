"""What a node's launcher prints: tracebacks wait for their rank's end, and are then in its report alone."""

import io
import json
import math
import sys
import time

import pytest

from tacit_lab.testbed import Failure, outputs, rank
from tacit_lab.testbed.failure_attribution import Node, RankReport, agreed, parted, silent
from tacit_lab.testbed.outputs import Output

HEAD = "Traceback (most recent call last):"
UNCAUGHT = [f"[rank1]: {HEAD}", '[rank1]:   File "a.py", line 1', "[rank1]: ValueError: bad"]
LOST = (
    f"{HEAD}\n  File\ntacit.errors.PeerLost: rank 1 did not answer in round 20: gone or frozen (rank 0: why)"
)


def held(*lines: str) -> list[str]:
    """Those that are taken for lines of tracebacks."""
    block = rank.TracebackDetector()
    return [line for line in lines if block.holds(line)]


def test_lines_of_tracebacks_are_told_from_others() -> None:
    assert held("a", *UNCAUGHT, "b", "[rank1]: more of it", "[rank2]: other") == [
        *UNCAUGHT,
        "[rank1]: more of it",
    ]
    plain = [HEAD, '  File "a.py", line 1', "    f()", "ValueError: bad"]
    assert held("a", *plain, "b", "  indented") == plain
    chained = [*plain, "", "During handling of the above exception, another exception occurred:", "", *plain]
    assert held(*chained, "b") == chained
    assert held("we print Traceback (most recent call last):", "  indented") == []
    noise = [
        "terminate called after throwing an instance of 'gloo::IoException'",
        "  what():  [/__w/pytorch/pair.cc:553] Connection closed",
        "[rank2]:[W1122 18:12:31.617992401 TCPStore.cpp:125] [c10d] recvValue failed",
        "frame #0: c10::Error::Error(...)",
    ]
    assert held(*noise, "  what(): my own") == noise


class Launcher:
    """Prints as keepers in a launcher do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holding: bool = True) -> None:
        self.screen = io.StringIO()
        monkeypatch.setattr(sys, "stderr", self.screen)
        self.node = Node(0)
        self.notes: list[str] = []
        self.output = Output(self.node, sys.stderr, None, self.notes.append, holding)

    def says(self, *messages: "dict[str, object] | str") -> None:
        for each in messages:
            line = each if isinstance(each, str) else rank.MARK + json.dumps({"rank": 1, **each})
            self.output.feed(line.encode() + b"\n")

    @property
    def lines(self) -> list[str]:
        return self.screen.getvalue().split("\n")[:-1]


def report(text: str, code: int = 1) -> list[dict[str, object]]:
    return [{"traceback": text}, {"code": code, "time": 1.0}]


def test_what_a_rank_ends_by_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(line.removeprefix("[rank1]: ") for line in UNCAUGHT)
    launcher = Launcher(monkeypatch)
    noise = "terminate called after throwing an instance of 'gloo::IoException'"
    launcher.says("before", *({"line": line} for line in UNCAUGHT), "between", {"line": noise}, *report(text))
    launcher.says("after", f"{HEAD}", "  torchrun's own", "ChildFailedError")
    launcher.output.flush()
    assert launcher.lines == ["before", "between", "after"]
    assert launcher.node.reports[1].traceback == text


def test_a_rank_that_goes_on_has_its_traceback_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    launcher.says({"line": HEAD}, {"line": "ValueError: ", "more": True}, {"line": "logged"})
    launcher.output.flush(time.monotonic())
    assert launcher.lines == []
    assert 0 < launcher.output.until - time.monotonic() <= 3
    launcher.output.flush(launcher.output.until + 1)
    assert launcher.lines == [HEAD, "ValueError: logged"]
    assert launcher.output.until == math.inf
    launcher.says({"line": HEAD}, {"line": "KeyError: 1"}, {"code": -9, "time": 1.0})
    assert launcher.lines[2:] == [HEAD, "KeyError: 1"], "it did not end by that"


def test_without_holding_all_is_printed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch, holding=False)
    launcher.says(*({"line": line} for line in UNCAUGHT), *report("x"), HEAD, "of torchrun")
    assert launcher.lines == [*UNCAUGHT, HEAD, "of torchrun"]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "nonsense", '{"rank": "x", "code": 1}', '{"rank": 1}', "1" * 5000]
)
def test_a_program_that_prints_the_mark_disturbs_nothing(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    launcher = Launcher(monkeypatch)
    launcher.says(rank.MARK + text)
    assert launcher.lines == [rank.MARK + text]


def test_notes_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    launcher.says({"note": "the disk is full"})
    assert (launcher.notes, launcher.lines) == (["the disk is full"], [])


# ---- who it was ----------------------------------------------------------------------------------------


def nodes(*reports: RankReport, stopped: bool = False) -> list[Node]:
    """Two nodes of two ranks."""
    found = [Node(0), Node(1)]
    for each in reports:
        message = {"rank": each.rank, "code": each.code, "time": each.time, "frozen": each.frozen}
        node = found[each.rank // 2]
        node.stopped = stopped and each.code < 0
        if each.traceback:
            node.hear({"rank": each.rank, "traceback": each.traceback})
        node.hear(message)
    return found


SURVIVOR = RankReport(0, 1, 5.0, LOST)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ((), "froze, or was cut off: it did not answer in round 20"),
        ((RankReport(1, -15, 9.0),), "froze, or was cut off: it did not answer in round 20"),
        ((RankReport(1, -9, 9.0, frozen=True),), "froze: it did not answer in round 20"),
        (
            (RankReport(3, 1, 4.0, "RuntimeError: Connection closed by peer"),),
            "froze, or was cut off: it did not",
        ),
    ],
)
@pytest.mark.parametrize("stopped", [False, True])
def test_a_rank_that_says_nothing_is_named_by_the_survivors(
    others: tuple[RankReport, ...], reason: str, stopped: bool
) -> None:
    found = silent(nodes(SURVIVOR, *others, stopped=stopped), 2)
    assert found is not None
    assert (found.rank, found.node) == (1, 0)
    assert found.reason.startswith(reason)


def test_one_that_says_why_it_failed_is_not_named_by_others() -> None:
    assert silent(nodes(SURVIVOR, RankReport(1, 1, 9.0, f"{HEAD}\nValueError: bad")), 2) is None
    assert silent(nodes(SURVIVOR, RankReport(1, -9, 9.0)), 2) is None
    assert silent(nodes(RankReport(2, 1, 9.0, f"{HEAD}\nValueError: bad")), 2) is None
    assert silent(nodes(), 2) is None


def test_other_ways_to_be_missing() -> None:
    def reason(said: str, *others: RankReport) -> str:
        found = silent(nodes(RankReport(0, 1, 5.0, f"{HEAD}\ntacit.errors.PeerLost: {said}"), *others), 2)
        assert found is not None
        return str(found)

    assert reason("rank 3 has left in round 20: SystemExit: 0") == (
        "rank 3 left early: it has left in round 20: SystemExit: 0 (node 1)"
    )
    assert reason("ranks 2, 3 did not enter round 7 in time (still in round 6) (x)") == (
        "rank 2 was late: it did not enter round 7 in time (node 1)"
    )
    silence = "rank 2 was silent for 8 s while others waited for it"
    assert reason(f"{silence}, though it is there") == (
        "rank 2 was late: it was silent for 8 s while others waited for it, though it is there (node 1)"
    )
    assert reason(f"{silence}: gone or frozen", RankReport(2, -9, 9.0, frozen=True)) == (
        "rank 2 froze: it was silent for 8 s while others waited for it (node 1)"
    )
    assert reason("rank 2 stood still for 8 s in round 7, as if stopped (x)") == (
        "rank 2 froze for a while: it stood still for 8 s in round 7, as if stopped (node 1)"
    )


@pytest.mark.parametrize("where", ["torch", ".venv/lib/python3.11/site-packages/torch"])
def test_what_the_launcher_logs_is_not_printed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    line = f"E1122 22:49:00.042000 29459 {where}/distributed/elastic/multiprocessing/api.py:1002] failed"
    assert launcher.output._is_of_launcher(line)
    assert not launcher.output._is_of_launcher("E1122 of mine")


NAN = "tacit.errors.NonFinite: NaN or infinity in the gradient of 0.weight on rank 3, in step 5: no rank has"


EARLY = (
    "tacit.errors.UnevenData: rank 2 closed its session after 6 steps, rank 0 is at step 9: give every rank"
)


def test_one_that_all_name_is_the_one_that_failed() -> None:
    early = agreed(nodes(*(RankReport(rank, 1, 5.0, f"{HEAD}\n{EARLY}") for rank in (0, 2))), 2)
    assert str(early) == "rank 2 closed its session after 6 steps, rank 0 is at step 9 (node 1)"
    said = [RankReport(rank, 1, 5.0 + rank, f"{HEAD} {rank}\n{NAN}") for rank in (0, 1, 3)]
    found = agreed(nodes(*said), 2)
    assert found == Failure(
        1, 3, "had NaN or infinity in the gradient of 0.weight, in step 5", f"{HEAD} 3\n{NAN}"
    )
    assert agreed(nodes(SURVIVOR), 2) is None
    assert agreed(nodes(RankReport(2, 1, 1.0, f"{HEAD}\nValueError: bad"), *said), 2) is None
    assert agreed(nodes(), 2) is None


CUT = f"{HEAD}\ntacit.errors.PeerLost: the launcher's store cannot be reached: no answer within 5 s"


def test_a_node_that_all_others_have_lost_was_cut_off() -> None:
    here = RankReport(
        0, 1, 5.0, f"{HEAD}\ntacit.errors.PeerLost: rank 2 did not answer in round 3: gone or frozen"
    )
    two = parted(nodes(here, RankReport(2, 1, 6.0, CUT)))
    assert str(two) == "node 0 and node 1 lost each other: look at the link between them"
    third = Node(2)
    third.hear({"rank": 4, "traceback": CUT})
    third.hear({"rank": 4, "code": 1, "time": 6.0})
    three = [*nodes(here, RankReport(2, 1, 6.0, CUT)), third]
    assert str(parted(three)) == "node 0 was cut off: node 1 and node 2 did not reach it"
    assert parted([*nodes(here), third]) is None
    assert parted(nodes(here)[:1]) is None


def test_stopped_ranks_and_those_that_ended_well_are_known() -> None:
    node = Node(0)
    node.hear({"rank": 0, "well": True})
    node.hear({"rank": 1, "stopped": True})
    assert (node.well.keys(), node.halted.keys()) == ({0}, {1})
    node.hear({"rank": 1, "stopped": False})
    node.hear({"rank": 1, "well": True})
    assert (node.well.keys(), node.halted.keys()) == ({0, 1}, set())
    assert not node.reports


def test_a_plain_script_whose_rank_is_stopped() -> None:
    timeout = f"{HEAD}\nRuntimeError: [gloo] Timed out waiting 8000ms for recv operation to complete"
    found = silent(nodes(RankReport(0, 1, 5.0, timeout), RankReport(3, -9, 9.0, frozen=True)), 2)
    assert found == Failure(1, 3, "froze: it was stopped, and answered nobody")


def test_patience_is_longer_with_what_nothing_has_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(monkeypatch)
    launcher.says({"line": UNCAUGHT[0]})
    assert launcher.output.until - time.monotonic() > outputs.PATIENCE - 1
