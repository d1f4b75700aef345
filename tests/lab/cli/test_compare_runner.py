"""The order of events around a testbed, with one that only pretends."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_records import HEAD
from sample_timelines import run

from tacit import timelines
from tacit.algorithms import parse
from tacit.errors import TestbedError
from tacit_lab import records
from tacit_lab.cli.compare import runner
from tacit_lab.cli.compare.display import Display
from tacit_lab.cli.compare.options import CompareOptions
from tacit_lab.cli.compare.recorder import ComparisonRecorder
from tacit_lab.cli.interrupts import Interrupted
from tacit_lab.cluster import Cluster
from tacit_lab.recipes.progress import Progress, line_of
from tacit_lab.records import EndRecord
from tacit_lab.testbed import Failure, Result
from tacit_lab.testbed.results import Relayed

WELL = Result(0, (), timed_out=False, seconds=1.0)
PROGRESS = Progress(algorithm="topk", epoch=0, step=1, steps=2, seconds=0.1, loss=2.0, accuracy=None, mb=None)


class Bed:
    """Answers each run with what `play` says; remembers what was run."""

    shaped = True
    play: Callable[[str], Result]

    def __init__(self, cluster: Cluster) -> None:
        self.log: list[str] = log
        self.log.append(f"built {cluster}")

    def __enter__(self) -> "Bed":
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("gone")

    def run(
        self,
        argv: Sequence[str],
        *,
        on_line: Callable[[int, str], None],
        timeout: float,
        servers: bool,
    ) -> Result:
        assert not servers, "none of these algorithms needs any"
        options = dict(zip(argv[2::2], argv[3::2], strict=False))
        self.log.append(f"{options['--algorithm']} for {options['--epochs']}, at most {timeout:g} s")
        assert argv[-1] == "--shaped"
        on_line(0, PROGRESS.to_line())
        on_line(1, "a warning")
        about = {"algorithm": options["--algorithm"]}
        result = type(self).play(options["--algorithm"])
        ended = [EndRecord(**about, seed=int(options["--seed"]), status="ok")] if result.ok else []
        for record in (replace(HEAD, **about), replace(run("ddp")[0], **about), *ended):
            on_line(0, line_of(record))
        return result


log: list[str] = []


class Screen(Display):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def started(self, algorithm: str, place: str) -> None:
        self.seen.append(algorithm)

    def advanced(self, progress: Progress) -> None:
        self.seen.append(progress)

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompareOptions:
    log.clear()
    monkeypatch.setattr(runner, "Testbed", Bed)
    monkeypatch.setattr(Bed, "play", staticmethod(lambda algorithm: WELL), raising=False)
    return CompareOptions(
        recipe="digits",
        cluster=Cluster.parse("2x2@100mbit"),
        strategies=(parse("ddp"), parse("topk")),
        epochs=3,
        target=0.9,
        timeout=60,
        folder=tmp_path,
    )


def test_all_algorithms_and_the_limit_share_one_testbed(options: CompareOptions) -> None:
    screen = Screen()
    recorder = ComparisonRecorder(options)
    runner.train_all(options, screen, recorder)
    turns = [f"{name} for 3, at most 60 s" for name in ("ddp", "topk", "compute-only")]
    assert log == ["built 2x2@100mbit", *turns, "gone"]
    shown = [[name, replace(PROGRESS, algorithm=name)] for name in ("ddp", "topk", "compute-only")]
    assert screen.seen == [each for pair in shown for each in pair]
    assert options.output.read_text().splitlines()[0] == "[ddp, node 1] a warning"
    heads = [record for record in recorder.records if isinstance(record, records.RunRecord)]
    assert [record.algorithm for record in heads] == ["ddp", "topk", "compute-only"]
    assert list(records.read(options.records)) == recorder.records
    assert [each.algorithm for each in timelines.read(options.timeline)] == ["ddp", "topk", "compute-only"]


def test_a_run_says_what_its_relay_took(options: CompareOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    result = replace(WELL, relayed=Relayed(0.7, 0.03, 1e-4))
    monkeypatch.setattr(Bed, "play", staticmethod(lambda algorithm: result))
    runner.train_all(options, Screen(), ComparisonRecorder(options))
    ends = [each for each in records.read(options.records) if isinstance(each, records.EndRecord)]
    assert {each.relay_cores for each in ends} == {0.7}
    assert {each.relay_doubt for each in ends} == {result.relayed and result.relayed.doubt}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            Result(1, (Failure(1, 3, "exit code 1", "Traceback:\n  f()\nValueError: bad"),), False, 1.0),
            "topk failed: rank 3 ended with exit code 1 (node 1): ValueError: bad",
        ),
        (
            Result(1, (Failure(0, 0, "killed by SIGKILL"), Failure(1, 2, "exit code 1")), False, 1.0),
            "topk failed: rank 0 was killed by SIGKILL (node 0)",
        ),
        (Result(124, (), True, 60.0), "topk failed: it was stopped after 60 s, see --timeout"),
        (Result(3, (), False, 1.0), "topk failed: exit code 3"),
    ],
)
def test_a_failure_names_rank_and_reason_and_the_others_are_trained(
    options: CompareOptions, monkeypatch: pytest.MonkeyPatch, result: Result, message: str
) -> None:
    monkeypatch.setattr(Bed, "play", staticmethod(lambda algorithm: result if algorithm == "topk" else WELL))
    with pytest.raises(TestbedError) as caught:
        runner.train_all(options, Screen(), ComparisonRecorder(options))
    assert str(caught.value).splitlines()[0] == message
    assert str(caught.value).endswith("output.log")
    assert log[-3:] == ["topk for 3, at most 60 s", "compute-only for 3, at most 60 s", "gone"]
    _, end, last = [each for each in records.read(options.records) if isinstance(each, records.EndRecord)]
    assert (end.algorithm, end.status, end.seconds) == ("topk", "failed", None)
    assert (last.algorithm, last.status) == ("compute-only", "ok")
    assert message in (end.error or "")


def test_if_the_first_run_fails_nothing_else_is_tried(
    options: CompareOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bed, "play", staticmethod(lambda algorithm: Result(3, (), False, 1.0)))
    with pytest.raises(TestbedError, match="ddp failed: exit code 3"):
        runner.train_all(options, Screen(), ComparisonRecorder(options))
    assert log[1:] == ["ddp for 3, at most 60 s", "gone"]


def test_an_interrupt_is_on_record_and_goes_on_its_way(
    options: CompareOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def play(algorithm: str) -> Result:
        raise Interrupted(15)

    monkeypatch.setattr(Bed, "play", staticmethod(play))
    with pytest.raises(Interrupted):
        runner.train_all(replace(options, strategies=(parse("ddp"),)), Screen(), ComparisonRecorder(options))
    assert log[-1] == "gone"
    *_, end = records.read(options.records)
    assert isinstance(end, records.EndRecord)
    assert (end.status, end.error) == ("interrupted", "stopped by SIGTERM")
