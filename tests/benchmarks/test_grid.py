"""A grid is resumed, a failure is tried again, and the statistics are the textbook's."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import comparing
from grid import COMPUTE_ONLY, carry_out, paired
from runs import Done, Run, append, read
from tacit.files import Log
from tacit_lab.records import EndRecord, Environment, EpochRecord, RunRecord

SEEDS = range(3)
ALGORITHMS = ("ddp", "daso")
RUNS = [Run(("digits",), name, "2x2", seed=seed, epochs=1) for seed in SEEDS for name in ALGORITHMS]


class Fake:
    """Trains nothing; notes what it was asked for."""

    def __init__(self, fails: Sequence[str] = (), dies_after: int | None = None) -> None:
        self.fails, self.dies_after = fails, dies_after
        self.calls: list[tuple[int, tuple[str, ...]]] = []
        self.given = 0

    def __call__(self, group: Run, algorithms: Sequence[str]) -> Iterator[Done]:
        self.calls.append((group.seed, tuple(algorithms)))
        for algorithm in (*algorithms, COMPUTE_ONLY):
            if self.given == self.dies_after:
                raise KeyboardInterrupt
            self.given += 1
            run = replace(group, algorithm=algorithm)
            if algorithm in self.fails:
                yield Done(run, "failed", error="no luck")
                return
            yield Done(run, "ok", accuracy=0.5, seconds=1.0, megabytes=1.0, steps=10)


def silent(text: str) -> None:
    pass


def test_runs_alike_but_for_the_algorithm_are_made_in_one_call(tmp_path: Path) -> None:
    fake = Fake()
    done = carry_out(RUNS, tmp_path / "x.jsonl", fake, silent)
    assert fake.calls == [(seed, ALGORITHMS) for seed in SEEDS]
    assert {each.run for each in done} == {*RUNS, *(replace(run, algorithm=COMPUTE_ONLY) for run in RUNS)}
    assert all(each.hardware["torch"] and each.hardware["date"] for each in done)


def test_what_was_interrupted_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path, fake = tmp_path / "x.jsonl", Fake(dies_after=4)
    with pytest.raises(KeyboardInterrupt):
        carry_out(RUNS, path, fake, silent)
    again = Fake()
    assert len(carry_out(RUNS, path, again, silent)) == 9
    assert again.calls == [(1, ("daso",)), (2, ALGORITHMS)]
    third = Fake()
    carry_out(RUNS, path, third, silent)
    assert third.calls == []


def test_a_failed_run_is_kept_and_tried_again_and_the_others_go_on(tmp_path: Path) -> None:
    path, fake = tmp_path / "x.jsonl", Fake(fails=["ddp"])
    found = carry_out(RUNS, path, fake, silent)
    assert {each.run.algorithm: each.error for each in found if each.status == "failed"} == {"ddp": "no luck"}
    assert sum(each.status == "ok" and each.run.algorithm == "daso" for each in found) == 3
    again = Fake()
    found = carry_out(RUNS, path, again, silent)
    assert again.calls == [(seed, ("ddp",)) for seed in SEEDS]
    assert all(each.status == "ok" for each in found)


def test_a_line_cut_short_is_passed_over_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    carry_out(RUNS[:1], path, Fake(), silent)
    path.write_bytes(path.read_bytes()[:-30])
    append(path, Done(RUNS[1], "ok", accuracy=0.75).to_json())
    assert [(each.run, each.accuracy) for each in read(path)] == [(RUNS[0], 0.5), (RUNS[1], 0.75)]


def test_data_may_lie_elsewhere(tmp_path: Path) -> None:
    def run(folder: str) -> Run:
        return Run(("cifar10", "--data", f"{folder}/images.tar", "--limit", "100"), "ddp", "2x2")

    carry_out([run("/a")], tmp_path / "x.jsonl", Fake(), silent)
    fake = Fake()
    assert len(carry_out([run("/b")], tmp_path / "x.jsonl", fake, silent)) == 2
    assert fake.calls == []


# ---- statistics ---------------------------------------------------------------------------------------


def test_runs_are_paired_by_seed_within_their_setting() -> None:
    def done(algorithm: str, seed: int, accuracy: float | None, seconds: float, cluster: str = "2x2") -> Done:
        run = Run(("digits",), algorithm, cluster, seed=seed)
        return Done(run, "ok", accuracy=accuracy, seconds=seconds, megabytes=10 * seconds)

    rows = paired(
        [
            *(done("ddp", seed, 0.5 + seed / 10, 2.0) for seed in range(3)),
            *(done("daso", seed, 0.5 + seed / 10 + 0.01, 1.0 + seed) for seed in range(3)),
            done("daso", 7, 0.1, 1.0),  # ddp has no such seed
            done("ddp", 0, 0.1, 100.0, "4x1"),  # in another setting, where there is nothing to pair
            done(COMPUTE_ONLY, 0, 0.1, 0.5),
            Done(Run(("digits",), "topk", "2x2"), "failed", error="no luck"),
        ]
    )
    (row,) = rows
    assert (row["algorithm"], row["cluster"], row["seeds"]) == ("daso", "2x2", [0, 1, 2])
    assert row["difference"].mean == pytest.approx(0.01)
    assert row["difference"].half == pytest.approx(0.0, abs=1e-12), "paired: the seeds' own spread is gone"
    assert row["time"].mean == pytest.approx(1.0)
    assert row["bytes"].mean == pytest.approx(1.0)
    assert row["baseline_accuracy"].mean == pytest.approx(0.6)


# ---- what tacit compare leaves -------------------------------------------------------------------------

HERE = Environment(python="3", torch="2", tacit="0", cpu="x", cores=2, kernel="6", date="2026-01-01")


def head(algorithm: str) -> RunRecord:
    return RunRecord(
        algorithm=algorithm, strategy="S", recipe="digits", cluster="2x2", shaped=True, seed=1, epochs=1,
        target=0.9, batch_per_rank=16, world_size=4, parameters=7, environment=HERE,
    )  # fmt: skip


def test_records_become_runs(tmp_path: Path) -> None:
    with closing(Log(tmp_path / "records.jsonl")) as log:
        log.write(head("ddp").to_json())
        log.write(
            EpochRecord(
                algorithm="ddp", epoch=1, step=22, seconds=2.0, loss=None, accuracy=0.5, bytes_between_nodes=9
            ).to_json()
        )
        log.write(
            EndRecord(
                algorithm="ddp",
                status="ok",
                seconds=2.0,
                steps=22,
                mb_between_nodes=9.0,
                accuracy=0.5,
                loss=None,
            ).to_json()
        )
        log.write(head("daso").to_json())
        log.write(EndRecord(algorithm="daso", status="failed", error="rank 1 was lost").to_json())
        log.write(head("topk").to_json())
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "end", "algorithm": "to')
    (tmp_path / "output.log").write_text("[daso, node 0] Traceback")
    group = Run(("digits",), "", "2x2", seed=1, epochs=1)
    ddp, daso = comparing._ended(group, tmp_path)
    assert (ddp.run, ddp.status) == (replace(group, algorithm="ddp"), "ok")
    assert (ddp.accuracy, ddp.steps, ddp.megabytes, ddp.parameters) == (0.5, 22, 9.0, 7)
    assert ddp.curve == [[22, 2.0, None, 0.5]]
    assert daso.error is not None
    assert daso.error.startswith("rank 1 was lost")
    assert "Traceback" in daso.error
    assert Done.from_json(ddp.to_json()) == ddp


def test_servers_are_asked_for_where_they_have_something_to_do() -> None:
    group = Run(("digits",), "", "4x1", servers=1)
    assert "--servers" in comparing._words(group, ["ddp", "ps"], Path("out"))
    assert "--servers" not in comparing._words(group, ["ddp"], Path("out"))


def test_a_call_that_trains_nothing_fails_with_what_it_says(tmp_path: Path) -> None:
    run = Run(("nonsense",), "ddp", "local:2")
    (done,) = (each for each in carry_out([run], tmp_path / "x.jsonl", tell=silent))
    assert done.status == "failed"
    assert done.error is not None
    assert "nonsense" in done.error


def test_missing_images_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="--download") as told:
        comparing.images()
    assert str(tmp_path) in str(told.value)
    with pytest.raises(SystemExit, match="nowhere"):
        comparing.images("/nowhere")
    (tmp_path / "cifar10-jpeg-q75.tar.xz").touch()
    assert comparing.images() == tmp_path / "cifar10-jpeg-q75.tar.xz"
    assert comparing.images(str(tmp_path)) == tmp_path / "cifar10-jpeg-q75.tar.xz"
    assert comparing.images("/proc") == Path("/proc")  # a folder of images, as far as is known
