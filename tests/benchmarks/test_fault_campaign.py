"""The campaign of faults: what is drawn, how it is judged, and a few trials of it."""

import os
import subprocess
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import fault_runs
from fault_runs import Found, judge, made
from fault_scenes import ENDING, SCENES, Ended, alike, misdeeds
from fault_trials import APART, FAMILIES, FATAL, KINDS, LAYOUTS, TRANSIENT, Trial, faults, worlds
from faults import summary
from forks import COMMAND, Fork
from tacit.algorithms import parse, registry


def test_a_campaign_has_all_kinds_and_families_and_is_drawn_alike_again() -> None:
    trials = faults(320, seed=0)
    assert trials == faults(320, seed=0) != faults(320, seed=1)
    kinds, families = (Counter(each) for each in zip(*((t.kind, t.families[0]) for t in trials), strict=True))
    assert kinds.keys() == KINDS.keys()
    assert len(kinds) >= 12
    assert families.keys() == FAMILIES.keys()
    assert min(kinds.values()) >= 15
    assert min(families.values()) >= 6
    assert {trial.world for trial in trials} >= {2, 3, 4, 5, 6, 7, 8}
    assert all(0 <= rank < trial.world for trial in trials for rank in trial.ranks)


def test_the_worlds_are_all_layouts_of_up_to_eight_ranks() -> None:
    assert len(LAYOUTS) == 20
    assert {trial.cluster for trial in worlds(0)} == {*LAYOUTS}
    assert {family for trial in worlds(0) for family in trial.families} == FAMILIES.keys()


def test_every_family_has_an_algorithm() -> None:
    for text in FAMILIES.values():
        parse(text)
    families = {registry.ENTRIES[text.partition(":")[0]].family for text in FAMILIES.values()}
    automatic = {"automatic"}  # it goes on with one of the others
    assert families == {entry.family for entry in registry.ENTRIES.values()} - automatic


SPARSE = Trial(0, ("sparse",), "2x2", "kill", (3,), 5)
WELL = Found(0, 3.0, sums={str(rank): {"topk:ratio=0.1": 7} for rank in range(4)})


def test_what_ends_a_training_is_judged_by_its_end_and_the_name() -> None:
    named = Found(137, 5.0, named=[3], summary="tacit: script failed: rank 3 was killed by SIGKILL")
    assert judge(SPARSE, named, None) == []
    assert judge(SPARSE, replace(named, named=[0]), None)[0].startswith("wrong name")
    assert judge(SPARSE, replace(named, code=0), None)[0].startswith("exit code 0")
    assert judge(SPARSE, replace(named, seconds=60.0), None)[0].startswith("hang")
    assert judge(SPARSE, replace(named, left=["process x"]), None) == ["left behind: process x"]
    assert "hang" in judge(SPARSE, replace(named, code=None), None)[0]


def test_what_passes_is_judged_by_the_result() -> None:
    slow = replace(SPARSE, kind="slow")
    assert judge(slow, WELL, WELL) == []
    other = replace(WELL, sums={rank: {"topk:ratio=0.1": 8} for rank in WELL.sums})
    assert judge(slow, other, WELL) == ["wrong result: topk:ratio=0.1 is not what it is without the fault"]
    drifted = replace(WELL, sums=WELL.sums | {"0": {"topk:ratio=0.1": 9}})
    assert "wrong result: replicas of topk:ratio=0.1 differ" in judge(slow, drifted, WELL)
    assert judge(slow, replace(WELL, sums={}), WELL) == ["0 of 4 ranks came to the end"]
    assert judge(slow, replace(WELL, code=1), WELL)[0].startswith("exit code 1")


def test_a_summary_counts_what_is_wrong() -> None:
    rows = [
        {"trial": {"kind": "kill"}, "found": {"wrong": ["wrong name: x", "left behind: y"]}},
        {"trial": {"kind": "freeze"}, "found": {"wrong": ["hang: not over"]}},
        {"trial": {"kind": "slow"}, "found": {"wrong": ["wrong result: z"]}},
        {"trial": {"kind": "none"}, "found": {"wrong": []}},
    ]
    counted = summary([{**row, "code_of": code} for row, code in zip(rows, "aaab", strict=True)])
    assert counted["code"] == {"a": 3, "b": 1}
    assert (counted["trials"], counted["faults"], counted["hangs"]) == (4, 3, 1)
    assert (counted["wrong results"], counted["leftovers"], counted["right rank named"]) == (1, 1, 0.5)


RAISED = "Traceback (most recent call last):\n  File x\n{}\n"
NAMED = Ended(1, "a log\n[rank0]: " + RAISED.format("tacit.errors.PeerLost: rank 1 did not answer"))


def test_each_that_is_left_is_judged_by_the_error_it_raises_last() -> None:
    assert misdeeds(NAMED, "rank 1") == misdeeds(Ended(0, ""), "") == []
    assert misdeeds(NAMED, "rank 2")[0].startswith("wrong name: 'tacit.errors.PeerLost")
    raw = Ended(1, NAMED.text + RAISED.format("RuntimeError: rank 1: connection closed by peer"))
    assert misdeeds(raw, "rank 1")[0].startswith("wrong name: a raw error: RuntimeError")
    assert misdeeds(Ended(0, NAMED.text), "rank 1")[0].startswith("exit code 0 after a fault")
    assert misdeeds(Ended(-9, "killed"), "")[0].startswith("exit code -9")
    assert misdeeds(Ended(2, "tacit: the cluster cannot be"), "cluster") == []
    assert alike({"0": {"topk": 7}, "1": {"topk": 7}}) == []
    assert alike({"0": {"topk": 7}, "1": {"topk": 8}}) == ["wrong result: replicas differ"]
    assert alike({}) == ["no rank came to the end"]
    assert SCENES.keys() > ENDING


def test_what_cannot_be_made_here_is_counted_apart() -> None:
    rows = [
        {"trial": {"kind": "memory of a cgroup"}, "found": {"wrong": [], "skipped": "no cgroup"}},
        {"trial": {"kind": "killed closing"}, "found": {"wrong": ["wrong name: x", "wrong name: y"]}},
    ]
    counted = summary([{**row, "code_of": "a"} for row in rows])
    assert counted["skipped"] == {"memory of a cgroup": "no cgroup"}
    assert (counted["trials"], counted["misnamed"], counted["right rank named"]) == (1, 1, 0.0)


@pytest.mark.testbed
@pytest.mark.skipif(os.geteuid() != 0, reason="links are cut by root only")
@pytest.mark.parametrize(
    ("family", "kind", "rank"),
    [
        ("periodic", "link 2 s", 1),
        ("low rank", "nan", 1),
    ],
)
def test_a_trial(family: str, kind: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by processes as a campaign has them, whose remains it finds; all else by forks."""

    def forked(argv: list[str], **given: Any) -> Fork:
        return Fork([argv[0], COMMAND, "tacit", *argv[3:]], **given)

    trial = Trial(0, (family,), "2x1", kind, (rank,), 5)
    with monkeypatch.context() as patch:
        patch.setattr(fault_runs, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forked}))
        if kind in FATAL:
            assert judge(trial, made(trial), None) == []
            return
        assert kind in TRANSIENT
        assert family not in APART
        undisturbed = made(trial.undisturbed)
    assert judge(trial, made(trial), undisturbed) == []
