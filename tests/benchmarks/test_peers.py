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

import fingerprints
import launched
import peer_list
import peer_rank
import peer_table
import peers
from forks import ran
from markdown_tables import part
from runs import lines as read_lines
from tacit.algorithms import parse
from tacit_lab import recipes
from tacit_lab.testbed import Failure, Result

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"
FAST = "4x1@100mbit"


def finished(side: str, seed: int, seconds: float, cluster: str = FAST, **more: Any) -> dict[str, Any]:
    """A run of torch's DDP, or of `dense` in its place."""
    row = peers.Side(peer_list.PEERS[0], side).row(cluster, 24, 8, seed, more.pop("rate", 1.0))
    evaluations = [
        {"step": 8, "loss": 1.0, "accuracy": 0.5},
        {"step": 16, "loss": 0.2, "accuracy": 0.96},
        {"step": 24, "loss": 0.3, "accuracy": 0.94},
    ]
    hardware = {"date": "2026-01-01", "cpu": "some", "cores": 2, "torch": "2.9", "commit": "abc"}
    found = {"hardware": hardware, "fingerprint": None, "busy": 0.1, "congestion_control": "cubic"}
    found |= {"status": "ok", "message": "", "seconds": seconds, "evaluations": evaluations}
    return row | found | {"mb_per_node": 12.0, "peak_mb": 300.0, "apart": 0.0} | more


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
    for steps in (peers.QUICK_STEPS, peers.TIMED, peers.TRAINED):
        assert all(steps % each.period == 0 for each in peer_list.PEERS)


def test_every_peer_has_a_name_a_way_and_a_counterpart_that_can_be_read() -> None:
    assert len({peer.name for peer in peer_list.PEERS}) == len(peer_list.PEERS)
    for peer in peer_list.PEERS:
        assert peer.way in peer_rank.WAYS
        if peer.ours:
            parse(peers.Side(peer, "tacit").row(FAST, 24, 8, 0, 1.0)["task"]["algorithm"])
        task = peers.Side(peer, "peer").row(FAST, 24, 8, 0, 1.0)["task"]
        assert peer_rank.Task(**task).way == peer.way


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "torchft"], "no peer 'torchft'; write one or more of torch-ddp"),
        (["--quick", "--table"], "--quick keeps nothing"),
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


# ---- runs ---------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, str, int, float]]]:
    """Which runs were made. torch's bf16 hook fails; the smaller rate is the better one."""
    done: list[tuple[str, str, str, int, float]] = []

    def run(row: dict[str, Any], *_: object) -> dict[str, Any]:
        task = row["task"]
        done.append((row["peer"], row["side"], row["cluster"], task["seed"], task["rate"]))
        if task["way"] == "bf16":
            return {"status": "failed", "message": "Error: no"}
        evaluations = [{"accuracy": 1.0 - task["rate"] / 10, "loss": 1.0}]
        return {"status": "ok", "message": "", "busy": 0.0, "seconds": 1.0, "evaluations": evaluations}

    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(fingerprints, "fingerprint", lambda arm: (1.0, 0.5))
    monkeypatch.setattr(peers, "hardware", dict)
    return done


HERE: dict[peer_list.Environment, Path | peer_list.Unavailable] = {peer_list.TORCH: Path(sys.executable)}


def test_rates_are_chosen_and_pairs_take_turns_and_nothing_is_made_twice(
    tmp_path: Path, runs: list[tuple[str, str, str, int, float]]
) -> None:
    wanted, path = peer_list.chosen("torch-ddp,torch-bf16"), tmp_path / "runs.jsonl"

    def go_on(source: str = "abc") -> list[tuple[str, str, str, int, float]]:
        """What a call makes."""
        runs.clear()
        record = peers.Record(path, HERE, source)
        best = peers.train(record, wanted, (1.0, 0.5), 2, 24)
        assert set(best.values()) == {0.5}
        peers.measure(record, wanted, best, FAST, 2, 24)
        return runs[:]

    made = go_on()
    pairs = [run for run in made if run[2] == FAST]
    trained = [run for run in made if run[2] != FAST]
    assert [run[1] for run in pairs] == ["peer", "tacit", "tacit", "peer"]
    assert {run[0] for run in pairs} == {"torch-ddp"}, "there is nothing beside what fails"
    assert [run[3:] for run in trained[:4]] == [(1000, 1.0), (1000, 0.5), (0, 0.5), (1, 0.5)]
    assert len([run for run in trained if run[:2] == ("torch-bf16", "peer")]) == 1
    with path.open("a") as file:
        file.write('{"peer": "torch-f')  # cut off
    assert go_on() == []
    assert go_on("def") == pairs, "times are of these sources, accuracies of this algorithm"


def test_what_is_of_another_algorithm_is_made_again(
    tmp_path: Path, runs: list[tuple[str, str, str, int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = peers.Side(peer_list.PEERS[0], "tacit")
    record = peers.Record(tmp_path / "runs.jsonl", HERE, "abc")
    for mark, count in (((1.0, 0.5), 1), ((1.01, 0.5), 1), ((1.0, 0.6), 2)):
        monkeypatch.setattr(fingerprints, "fingerprint", lambda arm, mark=mark: mark)
        record.trained(side, 24, 8, 0, 1.0)
        assert len(runs) == count


def test_no_run_begins_when_the_minutes_are_over(tmp_path: Path) -> None:
    record = peers.Record(tmp_path / "runs.jsonl", HERE, "abc", until=0.0)
    with pytest.raises(SystemExit, match="goes on from here"):
        record.trained(peers.Side(peer_list.PEERS[0], "peer"), 24, 8, 0, 1.0)


def test_a_peer_that_does_not_install_is_a_row_until_it_does(
    tmp_path: Path, runs: list[tuple[str, str, str, int, float]]
) -> None:
    (peer,) = peer_list.chosen("torchft-localsgd")
    no: dict[peer_list.Environment | None, Path | peer_list.Unavailable] = {
        peer_list.TORCHFT: peer_list.Unavailable("No matching distribution found for torchft-nightly")
    }
    path = tmp_path / "runs.jsonl"
    row = peers.Record(path, no, "abc").trained(peers.Side(peer, "peer"), 24, 8, 0, 1.0)
    assert row["message"] == "does not install: No matching distribution found for torchft-nightly"
    assert row["who"].startswith("torchft-nightly 20")
    assert not runs
    (line, *_, last) = tables([row | {"hardware": finished("peer", 0, 1.0)["hardware"]}])[4:]
    assert line.endswith("| does not install |  |  |  |")
    assert "does not install: No matching" in last
    here = {peer_list.TORCHFT: Path("python")}
    assert peers.Record(path, here, "abc").trained(peers.Side(peer, "peer"), 24, 8, 0, 1.0)["status"] == "ok"


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


def tables(rows: list[dict[str, Any]], stands: bool = True) -> list[str]:
    return peer_table.table(rows, lambda row: stands or row["side"] == "peer").splitlines()


def test_the_table_of_times_pairs_runs_of_one_seed_and_takes_the_last_of_each() -> None:
    rows = [
        finished("peer", 0, 10.0),
        finished("tacit", 0, 9.0),
        finished("tacit", 0, 5.0),
        finished("peer", 1, 30.0),
        finished("tacit", 1, 9.0),
        finished("tacit", 2, 6.0),
    ]
    lines = tables(rows)
    theirs, ours = (line.split(" | ") for line in lines if line.startswith(("| torch", "| tacit")))
    assert theirs[2:] == ["833", "", "0.50", "300 |"]
    assert ours[2:] == ["250", "0.40 (0.30 to 0.50)", "0.50", "300 |"]  # 5 / 10 and 9 / 30
    assert "TCP by cubic" in lines[0]


def test_the_table_of_accuracies_is_at_the_best_rate_and_tells_failures() -> None:
    low = [{"step": 24, "loss": 2.0, "accuracy": 0.9}]
    rows = [
        finished("peer", 1000, 1.0, peer_table.UNSHAPED, status="failed", message="Error: a`b"),
        finished("tacit", 1000, 1.0, peer_table.UNSHAPED, evaluations=low),
        finished("tacit", 1000, 1.0, peer_table.UNSHAPED, rate=0.5),
        finished("tacit", 0, 1.0, peer_table.UNSHAPED, rate=0.5),
        finished("tacit", 1, 1.0, peer_table.UNSHAPED, rate=0.5, evaluations=low),
    ]
    lines = tables(rows)
    theirs, ours = (line.split(" | ") for line in lines if line.startswith(("| torch", "| tacit")))
    assert theirs[2] == "failed"
    assert ours[2:] == ["0.5", "0.920 (0.900 to 0.940)", "16 (1 of 2)", "0 |"]
    assert lines[-1].endswith("plain DDP: `Error: a'b`")


def test_a_hook_of_torch_and_an_algorithm_of_one_name_are_two() -> None:
    (bf16,) = peer_list.chosen("torch-bf16")
    rows = [
        finished(side, 0, 1.0, peer_table.UNSHAPED) | peers.Side(bf16, side).row("4x1", 24, 8, seed, 1.0)
        for side in ("peer", "tacit")
        for seed in (0, peer_table.CHOOSING)
    ]
    rows[0]["status"] = rows[1]["status"] = "failed"
    theirs, ours = (line.split(" | ")[2] for line in tables(rows) if line.startswith(("| torch", "| tacit")))
    assert (theirs, ours) == ("failed", "1")


def test_what_is_not_of_todays_code_is_marked() -> None:
    rows = [finished("peer", 0, 1.0), finished("tacit", 0, 1.0)]
    (row,) = [line for line in tables(rows, stands=False) if peer_table.STALE in line and line[0] == "|"]
    assert row.startswith(f"| tacit{peer_table.STALE} | `dense`")
    assert not any(peer_table.STALE in line for line in tables(rows))
    assert not peer_table.stands(rows[1]), "it has no fingerprint"


def test_the_page_has_the_tables_of_the_runs() -> None:
    page = (ROOT / "docs" / "peers.md").read_text()
    rows = list(read_lines(peers.FILE, json.loads))
    (found,) = part("peers.py --publish").findall(page)
    for line in peer_table.table(rows, lambda row: True).splitlines():
        assert line in found.replace(peer_table.STALE, "")
