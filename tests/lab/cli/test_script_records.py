"""What the ranks of a script say, as records."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tacit.errors import ConfigError
from tacit_lab.cli.compare.scripts import Said, ScriptRun
from tacit_lab.cli.run.result import RunResult
from tacit_lab.cluster import Cluster
from tacit_lab.records import EndRecord, Environment, EpochRecord, RunKey, RunRecord

KEY = RunKey("topk", 3, 0.5)
RESULT = RunResult(
    script=("train.py",),
    algorithm="topk",
    cluster="2x1",
    status="ok",
    exit_code=0,
    mb_between_nodes=9.0,
    ranks=({"sessions": [{"metrics": {"rounds": 4}}]},),
    environment=Environment.here(),
)


def said(node: int, kind: str, at: float, sent: int | None, **facts: Any) -> Said:
    return Said(node=node, rank=node, kind=kind, at=at, sent=sent, **facts)


def heard(*lines: Said, cluster: str = "2x1", target: float | None = 0.5) -> ScriptRun:
    run = ScriptRun(("train.py", "--fast"), Cluster.parse(cluster), KEY, target)
    for line in lines:
        run.heard(line, "topk", None)
    return run


BEGUN = (said(0, "began", 10.0, 100, parameters=7, weights=0.5), said(1, "began", 10.5, 200, parameters=7))


def test_means_over_the_ranks_the_time_of_the_slowest_and_the_bytes_of_all() -> None:
    run = heard(
        *BEGUN,
        said(0, "report", 12.0, 1100, step=5, numbers={"loss": 2.0, "accuracy": 0.2}),
        said(1, "report", 13.5, 1200, step=5, numbers={"loss": 4.0, "accuracy": 0.4}),
        said(0, "report", 14.0, 2100, step=9, numbers={"loss": 1.0, "accuracy": 0.7}),
        said(1, "report", 14.5, 2200, step=9, numbers={"loss": 1.0, "accuracy": 0.9}),
        said(0, "ended", 15.0, 3100),
        said(1, "ended", 15.5, 3200),
    )
    head, first, second, end = run.records(RESULT, "TopK()", [])
    assert isinstance(head, RunRecord)
    assert isinstance(first, EpochRecord)
    assert isinstance(end, EndRecord)
    assert (head.recipe, head.parameters, head.weights, head.key) == ("train.py --fast", 7, 0.5, KEY)
    assert (first.step, first.seconds, first.loss, first.bytes_between_nodes) == (5, 3.0, 3.0, 2000)
    assert first.accuracy == pytest.approx(0.3)
    assert (end.steps, end.seconds, end.mb_between_nodes, end.seconds_to_target) == (9, 5.0, 0.006, 4.0)
    assert end.accuracy == end.validation == pytest.approx(0.8)
    assert isinstance(second, EpochRecord)
    assert second.key == end.key == KEY


def test_where_one_rank_alone_reports_bytes_are_known_at_the_end() -> None:
    run = heard(
        *BEGUN,
        said(0, "report", 12.0, 1100, step=5, numbers={"loss": 2.0}),
        said(0, "ended", 15.0, 3100),
        said(1, "ended", 15.5, 3200),
    )
    _, first, end = run.records(RESULT, "TopK()", [])
    assert isinstance(first, EpochRecord)
    assert isinstance(end, EndRecord)
    assert (first.bytes_between_nodes, first.accuracy) == (None, None)
    assert (end.mb_between_nodes, end.validation, end.seconds_to_target) == (0.006, -2.0, None)


@pytest.mark.parametrize("cluster", ["2x1+2", "2x1@100mbit+load=10mbit"])
def test_with_servers_or_a_background_load_bytes_are_those_of_the_whole_run(cluster: str) -> None:
    run = heard(
        *BEGUN, said(0, "report", 12.0, 1100, step=5, numbers={"loss": 2.0}), cluster=cluster, target=None
    )
    *_, end = run.records(RESULT, "TopK()", [])
    assert isinstance(end, EndRecord)
    assert (end.mb_between_nodes, end.seconds) == (9.0, 2.0)


def test_a_line_is_found_behind_other_output_and_a_part_of_one_is_none() -> None:
    text = json.dumps({"kind": "asked", "rank": 0, "at": 1.0, "sent": None})
    expected = Said(node=1, rank=0, kind="asked", at=1.0, sent=None)
    assert Said.of(1, f"loading...@tacit-trial {text}") == expected
    for line in (text, f"@tacit-trial {text[:-5]}", "@tacit-trial {}"):
        assert Said.of(0, line) is None


def test_a_script_that_reports_nothing_or_never_asks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.py --fast never called tacit\.report"):
        heard(*BEGUN).check("")
    reporting = heard(*BEGUN, said(0, "report", 12.0, 1, step=5, numbers={"loss": 2.0}))
    reporting.check("")
    with pytest.raises(ConfigError, match=r"--rates would do nothing, as train\.py --fast never calls"):
        reporting.check("--rates")


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((0,), "rank 0 lost its peers by it, and was ended"),
        ((0, 2), "ranks 0 and 2 lost their peers by it, and were ended"),
    ],
)
def test_one_rank_is_told_of_as_one(ranks: tuple[int, ...], says: str) -> None:
    assert says in replace(RESULT, dragged_along=ranks).why()
