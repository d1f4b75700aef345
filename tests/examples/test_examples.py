"""The examples, as their docstrings say to run them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forks import COMMAND, ran
from in_process_command import called

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALL = sorted(file.name for file in EXAMPLES.glob("[0-9]*.py"))


def run(folder: Path, name: str, *options: str, fresh: Sequence[int] = ()) -> tuple[str, dict[str, Any]]:
    """What the script printed, and what the command told of it; `fresh` ranks import it all by themselves."""
    words = (*options, "--out", str(folder), "--json", "--", str(EXAMPLES / name))
    done = called("run", *words, fresh=fresh)
    print(done.err, file=sys.stderr)
    assert done.code == 0, done.err
    *printed, last = done.out.splitlines()
    return "\n".join(printed), json.loads(last)


@pytest.mark.parametrize("name", ALL)
def test_an_example_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert text.startswith('"""')
    for command in (f"torchrun --nproc-per-node 2 examples/{name}", f" -- examples/{name}\n"):
        assert command in text


def test_top_k_on_two_emulated_machines(namespaces: None, tmp_path: Path) -> None:
    words = ("--cluster", "2x2@100mbit", "--algorithm", "topk:ratio=0.02")
    printed, told = run(tmp_path, "01_ddp_topk.py", *words, fresh=(0,))
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.85
    assert told["attached"] == ["topk:ratio=0.02"]
    (steps,) = {rank["sessions"][0]["metrics"]["steps"] for rank in told["ranks"]}
    dense = 2 * 4 * (64 * 512 + 512 * 512 + 512 * 10) * steps / 1e6  # what each of two nodes would send
    assert 0 < told["mb_between_nodes"] < 2 * dense / 5
    assert 0 < told["compute_share"] < 1


def test_local_sgd_takes_its_period_from_the_command(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "localsgd:sync_every=48")
    printed, told = run(tmp_path, "02_local_sgd.py", *words)
    assert float(printed.partition("step 240: ")[2].split()[0]) < 0.1
    rounds = [rank["sessions"][0]["metrics"]["rounds"] for rank in told["ranks"]]
    assert rounds[0] == rounds[1] <= 240 / 48 + 3 + 1  # its own, one before each of three looks, one to close
    assert told["mb_between_nodes"] is None


def test_a_checkpoint_changes_nothing(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "topk:ratio=0.02")
    printed, told = run(tmp_path, "03_checkpoint.py", *words)
    assert "the same, bit for bit" in printed
    sessions = told["ranks"][0]["sessions"]
    assert [session["metrics"]["steps"] for session in sessions] == [120, 50, 120]  # it goes on counting


def test_a_bare_hook_takes_any_algorithm_of_gradients(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "powersgd:rank=2")
    printed, told = run(tmp_path, "04_bare_hook.py", *words)
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.85
    assert told["attached"] == ["powersgd:rank=2"]


def test_epochs_and_the_loss_are_told(
    namespaces: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On seven ranks: whether all have told is asked of a sum of sevenths, which is not 1."""
    printed, told = run(tmp_path, "11_epochs_and_loss.py", "--cluster", "1x7", "--algorithm", "daso")
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.8
    assert told["attached"] == ["daso"]
    assert {rank["sessions"][0]["metrics"]["steps"] for rank in told["ranks"]} == {240}
    assert "all 7 ranks are on one node, where 'daso' is plain DDP" in capfd.readouterr().err


def test_sharded_replicas_on_two_emulated_machines(namespaces: None, tmp_path: Path) -> None:
    words = ("--cluster", "2x2@100mbit", "--algorithm", "diloco:sync_every=20,bits=4")
    printed, told = run(tmp_path, "05_fsdp2_diloco.py", *words, fresh=(0,))  # with its own order of sets
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.8
    assert "2 replicas, each on 2 ranks" in printed
    assert told["attached"] == ["diloco:sync_every=20,bits=4"]
    (steps,) = {rank["sessions"][0]["metrics"]["steps"] for rank in told["ranks"]}
    dense = 2 * 4 * 107_000 * steps / 1e6  # gradients of as many parameters, from each of two nodes
    assert 0 < told["mb_between_nodes"] < dense / 20


def test_lightning_takes_any_algorithm(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "topk:ratio=0.02")
    printed, told = run(tmp_path, "06_lightning.py", *words)
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.85
    assert told["attached"] == ["topk:ratio=0.02"]
    assert [rank["sessions"][0]["metrics"]["steps"] for rank in told["ranks"]] == [256, 256]


def test_a_checkpoint_of_accelerate_changes_nothing(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "diloco:sync_every=15")
    printed, told = run(tmp_path, "07_accelerate.py", *words)
    assert "the losses are the same" in printed
    for rank in told["ranks"]:
        assert [session["metrics"]["steps"] for session in rank["sessions"]] == [100, 100]


def test_replicas_of_the_trainer_meet_before_they_are_evaluated(tmp_path: Path) -> None:
    words = ("--cluster", "local:2", "--algorithm", "diloco:sync_every=10,bits=4")
    printed, told = run(tmp_path, "08_transformers_trainer.py", *words)
    assert float(printed.partition("40 steps, ")[2].split()[0]) < 1.3
    assert told["attached"] == ["diloco:sync_every=10,bits=4"]
    assert [rank["sessions"][0]["metrics"]["rounds"] for rank in told["ranks"]] == [8, 8]


def test_the_llama_of_torchtitan_learns_to_count(namespaces: None, tmp_path: Path) -> None:
    words = ("--cluster", "2x2@100mbit", "--algorithm", "diloco:sync_every=8,bits=4")
    printed, told = run(tmp_path, "09_torchtitan.py", *words)
    assert "2 replicas, each on 2 ranks" in printed
    assert float(printed.partition("loss ")[2].split()[0]) < 4, "log(2048) = 7.6 where nothing is known"
    assert told["attached"] == ["diloco:sync_every=8,bits=4"]
    megabytes = float(printed.partition("a rank sent ")[2].split()[0])
    assert 0 < megabytes < 3 * 4.1 / 8 * 6.17 / 2, "three rounds of half the parameters in about four bits"


def test_a_gan_has_two_sessions(tmp_path: Path) -> None:
    printed, told = run(tmp_path, "10_gan.py", "--cluster", "local:2", "--algorithm", "topk:ratio=0.05")
    assert int(printed.partition(" of 8 clusters found")[0].split()[-1]) >= 6
    sessions = told["ranks"][0]["sessions"]
    assert [session["metrics"]["steps"] for session in sessions] == [900, 900]
    dense = 4 * (8 * 128 + 128 * 128 + 128 * 2 + 2 * 128 + 2) * 900 / 1e6  # the generator's gradients in fp32
    assert 0 < float(printed.partition("gradients took ")[2].split()[0]) < dense / 5


def test_plain_torchrun_uses_the_algorithm_of_the_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACIT_ALGORITHM", raising=False)
    torchrun = ("torchrun", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    done = ran(COMMAND, *torchrun, str(EXAMPLES / "02_local_sgd.py"))
    assert done.code == 0, done.err
    assert "30 rounds in 240 steps" in done.out


def test_a_training_of_ones_own_is_as_before_where_nobody_compares(tmp_path: Path) -> None:
    printed, told = run(tmp_path, "12_own_training.py", "--cluster", "local:2", "--algorithm", "topk")
    assert float(printed.partition("accuracy ")[2].split()[0]) > 0.8
    assert "@tacit" not in printed
    assert told["attached"] == ["topk"]
