"""The command as it is typed."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias
from unittest.mock import Mock

import pytest
import typer
from image_files import as_archive, pictures

from in_process_command import called
from tacit.errors import TestbedError
from tacit_lab import cli, records
from tacit_lab.cli import application
from tacit_lab.cli.compare import options
from tacit_lab.cluster import Cluster
from tacit_lab.recipes import Choices
from tacit_lab.recipes.data.download import REMOTES, Remote

Curves: TypeAlias = dict[str, list[tuple[int, float]]]
TACIT = [sys.executable, "-m", "tacit_lab"]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What the command says when it is to exit with code 2."""
    monkeypatch.setattr(sys, "argv", ["tacit", "compare", *words])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit"], "unknown recipe 'digit'. Did you mean 'digits'"),
        (["--cluster", "2x"], "'2x'"),
        (["--cluster", "2x2@100mbut"], "100mbut"),
        (["--cluster", "100x1"], "too little data for 100 ranks"),
        (["--algorithms", "ddp,topc"], "unknown algorithm 'topc'. Did you mean 'topk'"),
        (["--algorithms", "topk:ratoi=0.1"], "Did you mean 'ratio'"),
        (["--algorithms", "ddp,ddp"], "'ddp' is listed twice"),
        (["--algorithms", "ddp,compute-only"], "leave it out"),
        (["--epochs", "0"], "--epochs 0 must be more than 0"),
        (["--target", "1.5"], "--target 1.5 must be between 0 and 1"),
        (["--target", "nan"], "--target nan must be between 0 and 1"),
        (["--seeds", "-1"], "--seeds -1 must be 0 or more"),
        (["--timeout", "0"], "--timeout 0.0 must be more than 0"),
        (["--epochs", "many"], "Invalid value for '--epochs'"),
        (
            ["bytes", "--model", "vit"],
            "--model would do nothing for bytes: leave it out, or train cifar10 and digits and mnist",
        ),
        (["--download"], "--download would do nothing for digits"),
        (["cifar10"], "write --data PATH for an image folder with train/CLASS/NAME.png"),
        (["cifar10", "--data", "absent"], "there is nothing at absent"),
        (["cifar10", "--data", __file__], "test_main.py is no archive that can be read"),
        (["cifar10", "--data", "some", "--download"], "--data some and --download exclude each other"),
        (["cifar10", "--model", "resnet"], "unknown model 'resnet'. Did you mean 'resnet8'"),
        (["mnist"], "write --data PATH for the folder with the four IDX files"),
        (["mnist", "--limit", "0"], "--limit 0 must be 1 or more"),
        (["mnist", "--precision", "fp8"], "unknown precision 'fp8'. Did you mean 'fp32'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_built(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tacit_lab.cli.compare.runner.train_all", None)  # calling it would be another error
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "out"
    error = refused(capsys, monkeypatch, *words, "--out", str(out))
    assert message in error
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert "cannot write" in refused(capsys, monkeypatch, "--out", str(tmp_path / "file" / "out"))
    (tmp_path / "records.jsonl").touch()
    assert "another comparison" in refused(capsys, monkeypatch, "--out", str(tmp_path))


def test_curves_are_not_drawn_over_those_of_another_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "curves" / "bf16").mkdir(parents=True)
    (tmp_path / "curves" / "bf16" / "events.out.tfevents.1.host").touch()
    words = ["--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "curves")]
    assert "curves of another run" in refused(capsys, monkeypatch, *words, "--algorithms", "ddp,bf16")
    assert not (tmp_path / "out").exists()


def test_curves_without_their_package_are_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.reporting.scalars.find_spec", lambda name: None)
    words = ["--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "curves")]
    assert "pip install 'torch-tacit[tensorboard]'" in refused(capsys, monkeypatch, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["compare", "digits"], ["run", "--", __file__]])
def test_what_cannot_be_built_leaves_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = Mock(side_effect=TestbedError("this kernel lacks the module sch_netem"))
    monkeypatch.setattr("tacit_lab.testbed.testbed.Testbed.__enter__", refuses)
    out = ["--out", str(tmp_path / "new" / "out")]
    monkeypatch.setattr(sys, "argv", ["tacit", words[0], *out, "--cluster", "2x1@1mbit,5ms", *words[1:]])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == "tacit: this kernel lacks the module sch_netem\n"
    assert refuses.called
    assert not (tmp_path / "new" / "out").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tacit", words[0], "--cluster", "2x1@1mbit,5ms", *words[1:]])
    with pytest.raises(SystemExit):
        cli.main()
    assert not (tmp_path / "tacit-out").exists()


def test_every_option_has_a_help_text_with_an_example() -> None:
    group = typer.main.get_command(application.app)
    commands = [group, *group.commands.values()]  # type: ignore[attr-defined]
    commands += group.commands["predictor"].commands.values()  # type: ignore[attr-defined]
    parameters = [parameter for command in commands for parameter in command.params]
    assert {"cluster", "algorithms", "as_json", "version", "hold_model", "period", "within"} <= {
        parameter.name for parameter in parameters
    }
    for parameter in parameters:
        if parameter.name in ("install_completion", "show_completion"):
            continue  # typer's own
        assert "e.g." in (parameter.help or ""), parameter.name


def test_help_and_version_import_neither_torch_nor_rich() -> None:
    code = (
        "import sys, tacit_lab.cli\n"
        "try: tacit_lab.cli.main()\n"
        "finally: print('torch' in sys.modules, 'rich' in sys.modules)"
    )
    for word, expected in (("--help", "compare"), ("--version", "tacit 0.")):
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert done.stdout.splitlines()[-1] == "False False"


def test_the_meaning_of_every_column_is_in_the_help() -> None:
    done = subprocess.run([*TACIT, "compare", "--help"], capture_output=True, text=True, check=True)
    text = " ".join(done.stdout.split())
    from tacit_lab.reports import MEANINGS

    for name, meaning in MEANINGS.items():
        assert f"{name}: {meaning}" in text


def test_a_real_comparison_prints_one_json_object_and_draws_curves(
    tmp_path: Path, read_curves: Callable[[Path], Curves]
) -> None:
    words = ["compare", "digits", "--cluster", "local:2", "--algorithms", "ddp", "--epochs", "1", "--json"]
    folders = ["--out", str(tmp_path / "out"), "--tensorboard", str(tmp_path / "curves")]
    done = called(*words, *folders, fresh=(0,))
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["cluster"], told["recipe"], told["shaped"]) == ("local:2", "digits", False)
    assert told["compute_only_seconds"] > 0
    (row,) = told["rows"]
    assert row["algorithm"] == "ddp"
    assert row["accuracy"] > 0.8
    assert row["seconds"] > 0
    assert row["speedup"] == 1.0
    assert row["mb_between_nodes"] is row["reduction"] is row["seconds_to_target"] is None
    assert row["of_compute_only"] == pytest.approx(told["compute_only_seconds"] / row["seconds"])
    assert "digits on local:2 (no network was shaped)" in done.err
    assert str(tmp_path / "out" / "records.jsonl") in done.err
    kinds = [record.kind for record in records.read(tmp_path / "out" / "records.jsonl")]
    assert kinds == ["run", "epoch", "end"] * 2
    ddp, alone = (read_curves(tmp_path / "curves" / name) for name in ("ddp", "compute-only"))
    steps = list(range(1, len(ddp["train/loss"]) + 1))
    assert [step for step, _ in ddp["train/loss"]] == [step for step, _ in alone["train/loss"]] == steps
    assert ddp["test/accuracy"] == [(steps[-1], pytest.approx(row["accuracy"]))]
    assert ddp["tacit/steps"][-1] == (steps[-1], steps[-1])


def test_images_are_trained_on_from_where_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_archive(tmp_path / "small.tar.xz", pictures(16, 4))
    words = ["compare", "cifar10", "--data", "small.tar.xz", "--model", "resnet8", "--limit", "128"]
    how = ["--cluster", "local:2", "--algorithms", "localsgd:sync_every=1", "--epochs", "1", "--json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TACIT_CACHE", "cache")
    done = called(*words, *how)
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["recipe"] == "cifar10 (resnet8, small.tar.xz, 128 images)"
    assert 0 <= told["rows"][0]["accuracy"] <= 1
    (records_,) = tmp_path.glob("tacit-out/*-cifar10/records.jsonl")
    assert {record.steps for record in records.read(records_) if isinstance(record, records.EndRecord)} == {2}
    assert [file.name for file in (tmp_path / "cache").glob("*.part")] == []


@pytest.mark.parametrize("native", [True, False])
def test_a_cpu_without_bfloat16_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr("tacit_lab.recipes.models.precision.is_native", lambda: native)
    said: list[str] = []
    asked = options.check(
        what=["cifar10"],
        cluster=Cluster.parse("local:2"),
        algorithms="ddp",
        epochs=None,
        target=None,
        seeds="0",
        rates="1",
        timeout=60,
        out=tmp_path / "out",
        choices=Choices(data=as_archive(tmp_path / "small.tar", pictures(16, 4)), precision="bf16"),
    )
    options.prepared(asked, None, download=False, tell=said.append)
    assert [each.partition(";")[2] for each in said] == [" --precision fp32 is faster here"] * (not native)


def test_what_is_asked_for_is_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, in place of the web."""
    path = as_archive(tmp_path / "small.tar", pictures(1, 1))
    content = path.read_bytes()
    remote = Remote(
        name="small.tar",
        addresses=(f"{tmp_path.as_uri()}/",),
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(REMOTES, "cifar10", (remote,))
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    error = refused(capsys, monkeypatch, "cifar10", "--download", "--out", str(tmp_path / "out"))
    assert "fetching file://" in error
    assert "too little data for 4 ranks" in error
    assert "fetching" not in refused(capsys, monkeypatch, "cifar10", "--download")
    assert "too little data" in refused(capsys, monkeypatch, "cifar10"), "what was fetched is found again"


def ranks_of(folder: Path) -> dict[int, int]:
    """The ranks that were started with a cache in this folder: rank -> process id."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            name = (process / "comm").read_text()
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TACIT_CACHE={folder}/cache".encode() in environment and name.startswith("tacit rank "):
            found[int(name.rpartition(" ")[2])] = int(process.name)
    return found


Process: TypeAlias = "subprocess.Popen[str]"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Process]:
    """A long comparison, past its first step."""
    words = ["compare", "digits", "--cluster", "local:2", "--algorithms", "ddp", "--epochs", "1000"]
    command = [*TACIT, *words, "--out", str(tmp_path)]
    env = {**os.environ, "TACIT_CACHE": str(tmp_path / "cache")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, env=env, text=True) as process:
        assert process.stderr is not None
        try:
            while "step" not in (line := process.stderr.readline()):
                assert line, "it ended before its first step"
            yield process
        finally:
            process.kill()


def ended(process: Process, folder: Path) -> str:
    """Wait for the end; nothing may be left behind. What was said on stderr."""
    _, err = process.communicate(timeout=60)
    assert ranks_of(folder) == {}
    assert "Traceback" not in err
    return err


def test_a_signal_tears_everything_down(running: Process, tmp_path: Path) -> None:
    """As SIGINT does, by the same lines: `test_run` has both."""
    assert set(ranks_of(tmp_path)) == {0, 1}
    running.send_signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in ended(running, tmp_path)
    assert running.returncode == 128 + signal.SIGTERM
    *_, end = records.read(tmp_path / "records.jsonl")
    assert isinstance(end, records.EndRecord)
    assert (end.algorithm, end.status) == ("ddp", "interrupted")


def test_a_rank_that_dies_is_named(running: Process, tmp_path: Path) -> None:
    os.kill(ranks_of(tmp_path)[1], signal.SIGKILL)
    assert "tacit: ddp failed: rank 1 was killed by SIGKILL" in ended(running, tmp_path)
    assert running.returncode == 1
    *_, end = records.read(tmp_path / "records.jsonl")
    assert isinstance(end, records.EndRecord)
    assert end.status == "failed"
    assert "rank 1" in (end.error or "")


INTERRUPTED = """
import os, signal, sys
from types import SimpleNamespace
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
stop = lambda name, *_: os.kill(os.getpid(), signal.SIGINT) if name == "typer" else None
sys.meta_path.insert(0, SimpleNamespace(find_spec=stop))
from tacit_lab.cli import main
main()
"""


@pytest.mark.parametrize(
    ("argv", "out", "encoding", "code", "says"),
    [
        ([*TACIT, "list"], "/dev/full", "utf-8", 1, "tacit: what it prints cannot be written: No space left"),
        ([sys.executable, "-m", "tacit_lab", "list"], "/dev/null", "ascii", 0, ""),
        ([sys.executable, "-c", INTERRUPTED], "/dev/null", "utf-8", 130, "tacit: stopped by SIGINT\n"),
    ],
)
def test_what_a_terminal_does_is_no_traceback(
    argv: list[str], out: str, encoding: str, code: int, says: str
) -> None:
    with Path(out).open("wb") as stdout:
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        ended = subprocess.run(argv, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True)
    assert ended.returncode == code
    assert ended.stderr.startswith(says)
    assert ended.stderr.count("\n") == bool(says)


def test_without_typer_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'typer'", name="typer")

    monkeypatch.setattr("tacit_lab.cli.import_module", missing)
    with pytest.raises(SystemExit, match=r"^tacit: the command needs typer, .* pip install '.\[cli\]'"):
        cli.main()
