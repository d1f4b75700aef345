"""`benchmarks/peers.py` without a network: names, environments, rows that are kept, the table."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import launched
import peer_list
import peer_rank
import peer_table
import peers
from forks import ran
from tacit.algorithms import parse
from tacit_lab import recipes
from tacit_lab.testbed import Failure, Result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"
SETTINGS = peers.Settings("2x1", 24, 60.0, "abc")


def finished(side: str, seed: int, seconds: float, **more: Any) -> dict[str, Any]:
    row = peers.Side(peer_list.PEERS[0], side).row(SETTINGS, seed)
    evaluations = [
        {"step": 8, "seconds": seconds / 3, "loss": 1.0, "accuracy": 0.5},
        {"step": 16, "seconds": seconds / 2, "loss": 0.2, "accuracy": 0.96},
        {"step": 24, "seconds": seconds, "loss": 0.3, "accuracy": 0.94},
    ]
    found = {
        "busy": 0.1,
        "withheld": 0.2,
        "status": "ok",
        "message": "",
        "seconds": seconds,
        "evaluations": evaluations,
    }
    return row | found | {"mb_per_node": 12.0, "peak_mb": 300.0, "apart": 0.0} | more


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    hardware = {"date": "2026-01-01", "cpu": "some", "cores": 2, "python": "3.11", "torch": "2.9"}
    return {
        "hardware": {**hardware, "commit": "abc"},
        "cluster": "2x1",
        "steps": 24,
        "target": 0.95,
        "rows": rows,
    }


# ---- names and options --------------------------------------------------------------------------------


def test_names_are_taken_in_the_order_of_the_list() -> None:
    assert [each.name for each in peer_list.chosen("torchft-diloco, torch-ddp")] == [
        "torch-ddp",
        "torchft-diloco",
    ]
    assert peer_list.chosen("") == list(peer_list.PEERS)


def test_a_quick_run_has_every_project_and_a_period_that_ends_with_it() -> None:
    quick = peer_list.chosen(peers.QUICK)
    assert {each.distribution for each in quick} == {each.distribution for each in peer_list.PEERS}
    assert all(peers.QUICK_STEPS % each.period == 0 for each in quick)


def test_every_peer_has_a_name_a_way_and_a_counterpart_that_can_be_read() -> None:
    assert len({peer.name for peer in peer_list.PEERS}) == len(peer_list.PEERS)
    for peer in peer_list.PEERS:
        assert peer.way in peer_rank.WAYS
        if peer.ours:
            parse(peers.Side(peer, "tacit").row(SETTINGS, 0)["task"]["algorithm"])
        task = peers.Side(peer, "peer").row(SETTINGS, 0)["task"]
        assert peer_rank.Task(**task).way == peer.way


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "torchft"], "no peer 'torchft'; write one or more of torch-ddp"),
        (["--steps", "20"], "write a multiple of 8 and 12"),
        (["--steps", "0"], "write a multiple of 8 and 12"),
        (["--seeds", "0"], "at least one seed"),
        (["--cluster", "two"], "two"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(words: list[str], said: str) -> None:
    done = ran(str(SCRIPT), *words)
    assert done.code == 2
    assert said in done.err


# ---- environments -------------------------------------------------------------------------------------


def test_pips_last_error_is_what_it_says() -> None:
    printed = (
        "ERROR: Could not find a version\nERROR: No matching distribution found for x==1\n\nWARNING: old\n"
    )
    assert peer_list.pip_says(printed) == "No matching distribution found for x==1"
    assert peer_list.pip_says("Killed\n") == "Killed"
    assert peer_list.pip_says("") == "pip failed, and printed nothing"


def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(peer_list, "_call", lambda command, timeout: _made(calls, command))
    old = peer_list.Environment("some", ("some==1",))
    python = old.make(tmp_path)
    assert python == tmp_path / "some" / "bin" / "python"
    assert "some==1" in calls[1]
    assert "--no-deps" in calls[2]
    assert old.make(tmp_path) == python
    assert len(calls) == 3
    peer_list.Environment("some", ("some==2",)).make(tmp_path, ["--extra-index-url", "there"])
    assert len(calls) == 6
    assert calls[4][-4:].count("some==2") == 1
    assert "there" in calls[4]


def _made(calls: list[list[str]], command: list[str]) -> None:
    calls.append(command)
    if "venv" in command:
        Path(command[-1]).mkdir(exist_ok=True)


def test_an_environment_that_failed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], timeout: float) -> None:
        if "pip" in command:
            raise peer_list.Unavailable("no")

    monkeypatch.setattr(peer_list, "_call", fail)
    for _ in range(2):
        with pytest.raises(peer_list.Unavailable, match="no"):
            peer_list.Environment("some").make(tmp_path)


def test_a_call_that_fails_gives_its_words_and_one_that_hangs_is_ended() -> None:
    with pytest.raises(peer_list.Unavailable, match="gone wrong"):
        peer_list._call([sys.executable, "-S", "-c", "print('ERROR: gone wrong'); raise SystemExit(1)"], 60)
    with pytest.raises(peer_list.Unavailable, match="not done after 1 s"):
        peer_list._call(["sleep", "600"], 1.0)


# ---- one rank -----------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one rank, of no launcher."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("way", ["tacit", "ddp", "fp16", "powersgd", "postlocal", "nobody"])
def test_a_rank_trains_and_evaluates_at_the_same_steps_in_every_way(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(peer_rank.WAYS, "nobody", lambda bench: replace(peer_rank.ddp(bench), alone=True))
    task = peer_rank.Task(way, steps=5, every=2, seed=0, period=2, start=3, algorithm="localsgd:sync_every=2")
    with ExitStack() as stack:
        recipe = recipes.get("digits")
        bench = peer_rank.Bench(task, recipe, stack)
        before = torch.cat([parameter.detach().flatten() for parameter in bench.module.parameters()])
        found = peer_rank.train(task, recipe, peer_rank.WAYS[way](bench))
    after = torch.cat([parameter.detach().flatten() for parameter in bench.module.parameters()])
    assert not torch.equal(before, after)
    evaluations = found["evaluations"]
    assert isinstance(evaluations, list)
    assert [each["step"] for each in evaluations] == [2, 4, 5]
    assert evaluations[-1]["seconds"] == found["seconds"]
    assert found["apart"] == 0.0
    assert found["mb_per_node"] is None  # no testbed's interface


def test_memory_is_that_of_the_processes_below_too() -> None:
    mine = peer_rank.peak_bytes()
    hold = "x = bytearray(50_000_000); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert peer_rank.peak_bytes() > mine + 40_000_000
        process.communicate(b"\n")


# ---- rows ---------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """Which rows were run; each takes its place in the list as seconds."""
    done: list[tuple[str, str, int]] = []

    def run(row: dict[str, Any], *_: object) -> dict[str, Any]:
        done.append((row["peer"], row["side"], row["seed"]))
        return {
            "busy": 0.0,
            "status": "ok",
            "message": "",
            "seconds": float(len(done)),
            "evaluations": [{"accuracy": 1.0}],
        }

    monkeypatch.setattr(peers, "run", run)
    return done


def test_peers_and_tacit_take_turns_and_finished_rows_are_not_run_again(
    tmp_path: Path, runs: list[tuple[str, str, int]]
) -> None:
    wanted = peer_list.chosen("torch-ddp,torch-fp16")
    path, here = tmp_path / "rows.jsonl", {None: Path(sys.executable)}
    interrupted = peers.measure(wanted, 2, SETTINGS, here, peers.StateSlice(path))
    first = [next(interrupted) for _ in range(3)]
    with path.open("a") as file:
        file.write('{"peer": "torch-f')  # cut off
    kept = peers.StateSlice(path)
    rows = list(peers.measure(wanted, 2, SETTINGS, here, kept))
    assert rows[:3] == first
    assert runs == [
        (peer, side, seed)
        for seed in range(2)
        for peer in ("torch-ddp", "torch-fp16")
        for side in ("peer", "tacit")
    ]
    other = peers.Settings(SETTINGS.cluster, 48, SETTINGS.timeout, SETTINGS.code)
    assert kept.find(peers.Side(wanted[0], "peer").row(other, 0)) is None
    changed = peers.Settings(
        SETTINGS.cluster, SETTINGS.steps, SETTINGS.timeout, peers.fingerprint("paired.py")
    )
    assert kept.find(peers.Side(wanted[0], "peer").row(changed, 0)) is None
    kept.forget()
    assert path.read_text() == ""


def test_a_peer_that_does_not_install_is_a_row_and_stops_nobody(
    tmp_path: Path, runs: list[tuple[str, str, int]]
) -> None:
    wanted = peer_list.chosen("torchft-localsgd,accelerate-localsgd")
    places = {
        None: Path(sys.executable),
        peer_list.TORCHFT: peer_list.Unavailable("No matching distribution found for torchft-nightly"),
        peer_list.ACCELERATE: Path("python"),
    }
    rows = list(peers.measure(wanted, 1, SETTINGS, places, peers.StateSlice(tmp_path / "rows.jsonl")))
    assert [row["status"] for row in rows] == ["failed", "ok", "ok", "ok"]
    assert rows[0]["message"] == "does not install: No matching distribution found for torchft-nightly"
    assert rows[0]["who"].startswith("torchft-nightly 20")
    assert ("torchft-localsgd", "peer", 0) not in runs


def test_last_words() -> None:
    traceback = "Traceback (most recent call last):\n  File\nValueError: no convolutions\n"
    raised = Result(1, (Failure(0, 0, "exit code 1", traceback),), False, 1.0)
    assert launched.last_words(raised, [], 9) == "ValueError: no convolutions"
    silent = 'Traceback\n  File "/a/hook.py", line 26, in orthogonalize\n    assert x\nAssertionError\n'
    assert launched.raised(silent) == "AssertionError, in orthogonalize (hook.py:26)"
    callback = "RuntimeError: Got the following error when running the callback: "
    assert (
        launched.raised(f"Traceback\n{2 * callback}IndexError: 3\n\nAt:\n  hook.py(92)\n") == "IndexError: 3"
    )
    aborted = Result(1, (Failure(0, 0, "killed by SIGABRT"),), False, 1.0)
    lines = ["node 1:   what():  bye", "node 0: terminate called", "node 0:   what():  sizes differ"]
    assert (
        launched.last_words(aborted, lines, 9)
        == "rank 0 was killed by SIGABRT (node 0): what():  sizes differ"
    )
    assert "not done after 9 s" in launched.last_words(Result(124, (), True, 9.0), lines, 9)


# ---- the table ----------------------------------------------------------------------------------------


def test_the_table_pairs_runs_of_one_seed_and_tells_failures() -> None:
    broken = {"status": "failed", "message": "Error: a|b"}
    rows = [
        finished("peer", 0, 10.0),
        finished("tacit", 0, 5.0),
        finished("peer", 1, 30.0),
        finished("tacit", 1, 9.0),
        finished("peer", 2, 0.0, **broken),
        finished("tacit", 2, 6.0),
    ]
    lines = peer_table.table(result(rows)).splitlines()
    theirs, ours = (line.split(" | ") for line in lines if line.startswith(("| torch", "| tacit")))
    assert theirs[2:5] == ["20.0 (2 of 3)", "10.0 (2 of 3)", "0.940"]
    assert ours[2:4] == ["6.0", "3.0"]
    assert ours[-1] == "0.40 |"  # the median of 5 / 10 and 9 / 30
    assert "other work kept the cores busy to 10%" in lines[1]
    assert "hypervisor withheld 20%" in lines[2]
    assert lines[-1].endswith("plain DDP, 1 of 3 runs: `Error: a|b`")


def test_a_target_that_is_not_reached_is_said_so() -> None:
    row = finished("peer", 0, 1.0)
    assert peer_table.to_target(row, 0.95) == 0.5
    assert peer_table.to_target(row, 0.97) is None
    assert "not reached" in peer_table.table(result([row]) | {"target": 0.97})


def test_the_page_has_the_table_of_a_saved_run() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    saved = sorted((ROOT / "benchmarks" / "results").glob("*-peers.json"))[-1]
    assert saved.name in page
    assert peer_table.table(json.loads(saved.read_text())) in page
