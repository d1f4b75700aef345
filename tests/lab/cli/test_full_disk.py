"""A folder that takes nothing more, or is gone, in the middle of a training: that is said, and no more."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forks import Done, ran
from tacit import files
from tacit.reporting import run_report
from tacit_lab import cli

TACIT = [sys.executable, "-m", "tacit_lab"]
SMALL_DISK = Path(__file__).parents[2] / "suite" / "small_disk.py"
SCRIPT = """
import os, shutil, sys, torch, torch.distributed as dist, tacit
from torch import nn
from torch.nn.parallel import DistributedDataParallel
out, happens, saved = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(10, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def happen():
    if rank == 0 and happens == "full":
        with open(out + "/big", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1024)): pass
            except OSError: pass
    if rank == 0 and happens == "deleted": shutil.rmtree(out)
    dist.barrier()
if happens == "full from the start": happens = "full"; happen()
with tacit.attach(model, optimizer, tacit.from_env()):
    for step in range(8):
        if step == 4: happen()
        optimizer.zero_grad(); model(torch.randn(4, 10)).sum().backward(); optimizer.step()
torch.save(model.state_dict(), f"{saved}/{rank}.pt")
sys.exit(int(os.environ.get("END_WITH", "0")))
"""


def on_a_small_disk(tmp_path: Path, words: list[str], beside: str = "", **env: str) -> Done:
    """Run with 256 KiB of disk at tmp_path/disk; what is on it in the end is copied to tmp_path/left."""
    disk = tmp_path / "disk"
    disk.mkdir()
    return ran("-u", str(SMALL_DISK), str(disk), str(tmp_path / "left"), beside, *words, **env)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("happens", "code"),
    [("full", 7), ("full from the start", 0), ("deleted", 0)],
)
def test_a_script_trains_on_and_saves_and_the_summary_is_printed(
    tmp_path: Path, happens: str, code: int
) -> None:
    script, saved = tmp_path / "train.py", tmp_path / "saved"
    script.write_text(SCRIPT)
    saved.mkdir()
    out = tmp_path / "disk" / "out"
    command = ["run", "--cluster", "local:2", "--algorithm", "bf16", "--out", str(out)]
    command += ["--tensorboard", str(out / "curves"), "--", str(script), str(out), happens, str(saved)]
    done = on_a_small_disk(tmp_path, command, END_WITH=str(code))
    assert done.code == code, done.err
    assert sorted(file.name for file in saved.iterdir()) == ["0.pt", "1.pt"]
    assert code or "Traceback" not in done.err
    notes = [line for line in done.err.splitlines() if line.endswith("; training goes on")]
    assert notes, done.err
    assert len({note.partition(":")[0] for note in notes}) == 1
    for what in ("numbers of the sessions", "bytes of the nodes", "run.json"):
        assert sum(what in note for note in notes) == 1, notes
    assert f"bf16 on local:2: {script}" in done.err
    assert "  seconds  " in done.err
    assert "Record:" not in done.err
    record = tmp_path / "left" / "out" / "run.json"
    if record.exists():
        assert json.loads(record.read_text())["status"] == "unfinished"


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("happens", ["full", "deleted"])
def test_a_comparison_goes_on_and_prints_its_table(tmp_path: Path, happens: str) -> None:
    """The disk is filled, or the folder is deleted, before the first record."""
    out = tmp_path / "disk" / "out"
    command = ["compare", "digits", "--cluster", "local:2", "--algorithms", "ddp", "--epochs", "1"]
    command += ["--json", "--out", str(out)]
    command += ["--tensorboard", str(out / "curves")] if happens == "full" else []
    begun = f"until test -e {out}/records.jsonl; do sleep 0.01; done"
    spoils = {
        "full": f"head -c 1M /dev/zero > {out}/big",
        "deleted": f"until rm -r {out}; do sleep 0.01; done",
    }
    done = on_a_small_disk(tmp_path, command, f"{begun}; {spoils[happens]}")
    assert done.code == 0, done.err
    (row,) = json.loads(done.out)["rows"]
    assert (row["algorithm"], row["status"]) == ("ddp", "ok")
    assert row["accuracy"] > 0.5
    assert "digits on local:2" in done.err
    notes = [line for line in done.err.splitlines() if line.endswith("; training goes on")]
    assert sum("records.jsonl is not whole" in note for note in notes) == 1
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize(
    ("words", "record", "told"),
    [
        (("compare", "--replicas", "in-process", "--epochs", "1"), "records.jsonl", "digits on 2x1"),
        (("study", "--steps", "5", "--quick"), "runs.jsonl", "digits, 5 steps"),
    ],
)
def test_replicas_of_one_process_train_on_and_the_table_is_printed(
    tmp_path: Path, words: tuple[str, ...], record: str, told: str
) -> None:
    out = tmp_path / "disk" / "out"
    more = ["--algorithms", "topk", "--seeds", "0", "--json", "--out", str(out)]
    more += ["--cluster", "2x1"] if words[0] == "compare" else []
    spoilt = f"until test -e {out}; do sleep 0.01; done; head -c 1M /dev/zero > {out}/big"
    done = on_a_small_disk(tmp_path, [*words, *more], spoilt)
    assert done.code == 0, done.err
    assert json.loads(done.out)["rows"][-1]["accuracy"]
    assert f"{record} is not whole: No space left on device; training goes on" in done.err
    assert told in done.err
    assert ": none, " in done.err, "the page"


def test_a_script_that_is_not_started_by_the_command_goes_on_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tacit

    for name in ("_CALLED", "_OPEN", "_CLOSED"):
        monkeypatch.setattr(run_report, name, [])
    monkeypatch.setattr(files, "_SAID", set())
    monkeypatch.setenv("TACIT_FOOTPRINT", str(tmp_path / "gone"))
    monkeypatch.delenv("TACIT_ALGORITHM", raising=False)
    assert tacit.from_env().name == "ddp"
    assert "not kept" in capsys.readouterr().err


# ---- what is left behind -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "message"),
    [
        ("", "holds what is left of a run that goes on or was cut off: give another --out, or remove"),
        ('{"status": "unfinished"}', "holds what is left of a run that goes on or was cut off"),
        ('{"status": "ok"}', "holds the record of another run: give another --out"),
        (None, "holds what is left of a run"),
    ],
)
def test_a_folder_with_a_broken_record_says_what_to_remove(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: str | None,
    message: str,
) -> None:
    (tmp_path / "ranks").mkdir()
    if left is not None:
        (tmp_path / "run.json").write_text(left)
    monkeypatch.setattr(sys, "argv", ["tacit", "run", "--out", str(tmp_path), "--", __file__])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert message in capsys.readouterr().err


def test_a_command_that_is_killed_leaves_a_record(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text("print('up')\nimport time; time.sleep(1000)")
    command = [*TACIT, "run", "--cluster", "local:1", "--out", str(out), "--", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()
    kept = json.loads((out / "run.json").read_text())
    assert (kept["status"], kept["exit_code"]) == ("unfinished", None)
    assert str(process.pid) in kept["error"]
    shutil.rmtree(out)
