"""Odd input to every command: one line that says what cannot be, exit code 2, and nothing is launched."""

import gzip
import io
import json
import os
import resource
import socket
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_records import DDP, HEAD, WHOLE

from tacit_lab import cli
from tacit_lab.records import Line

HUGE = str(10**30)
LONG = "x" * 10_000
BINARY = b"\x80\x04\xff\x00" * 50


class Launched(BaseException):
    """Something was started although it cannot be."""


def _launch(*_: object, **__: object) -> None:
    raise Launched


STARTS = (
    "tacit_lab.cli.compare.runner.train_all",
    "tacit_lab.cli.run.command._run",
    "tacit_lab.cli.predictor.runner.recorded",
    "tacit_lab.cli.predictor.runner.judge",
    "tacit_lab.predictor_training.mp2.train",
    "tacit_lab.predictor_training.wnn.train",
)


def records(*lines: Line | str) -> str:
    return "".join((line if isinstance(line, str) else line.to_json()) + "\n" for line in lines)


def changed(line: Line, **fields: object) -> str:
    return json.dumps({**json.loads(line.to_json()), **fields})


RECORDS = {
    "empty": "",
    "spaces": "\n\n \n",
    "nested": records("[" * 100_000),
    "nested-object": records('{"a":' * 100_000),
    "deep-metrics": records(HEAD, '{"kind": "end", "version": 1, "metrics": ' + "[" * 100_000),
    "no-object": records("[1, 2]"),
    "number": records("1e400"),
    "nan": records(changed(DDP, seconds=float("nan"))),
    "huge-integer": records(HEAD, changed(DDP, steps=0).replace('"steps": 0', '"steps": ' + "9" * 5000)),
    "other-kind": records('{"kind": "rum", "version": 1}'),
    "long-kind": records(json.dumps({"kind": LONG, "version": 1})),
    "newer": records(changed(HEAD, version=99)),
    "no-world": records(changed(HEAD, world_size=-4)),
    "zero-world": records(changed(HEAD, world_size=0)),
    "negative-epochs": records(changed(HEAD, epochs=-1)),
    "negative-seed": records(changed(HEAD, seed=-1)),
    "target-2": records(changed(HEAD, target=2.0)),
    "no-parameters": records(changed(HEAD, parameters=-1)),
    "no-batch": records(changed(HEAD, batch_per_rank=0)),
    "cores": records(
        changed(HEAD, environment={**json.loads(HEAD.to_json())["environment"], "cores": "two"})
    ),
    "no-environment": records(changed(HEAD, environment=[])),
    "negative-seconds": records(HEAD, changed(DDP, seconds=-60.0)),
    "negative-epoch-seconds": records(HEAD, changed(WHOLE[1], seconds=-1.0)),
    "accuracy-7": records(HEAD, changed(DDP, accuracy=7.0)),
    "epoch-accuracy": records(HEAD, changed(WHOLE[1], accuracy=-0.1)),
    "negative-bytes": records(HEAD, changed(WHOLE[1], bytes_between_nodes=-1)),
    "negative-mb": records(HEAD, changed(DDP, mb_between_nodes=-1.0)),
    "negative-steps": records(HEAD, changed(DDP, steps=-1)),
    "negative-target-seconds": records(HEAD, changed(DDP, seconds_to_target=-1.0)),
    "status": records(HEAD, changed(DDP, status="great")),
    "metrics-list": records(HEAD, changed(DDP, metrics=[1])),
    "servers-numbers": records(HEAD, changed(DDP, metrics={"servers": [1, 2]})),
    "servers-other": records(HEAD, changed(DDP, metrics={"servers": [{"x": 1}]})),
    "servers-number": records(HEAD, changed(DDP, metrics={"servers": 3})),
    "servers-words": records(
        HEAD,
        changed(
            DDP,
            metrics={
                "servers": [
                    {
                        "server": 0,
                        "pushes": "many",
                        "push_bytes": 1,
                        "pull_bytes": 1,
                        "queue_seconds": 0,
                        "stale": {},
                        "late": 0,
                    }
                ]
            },
        ),
    ),
    "long-field": records(changed(HEAD, **{LONG: 1})),
    "missing-field": records('{"kind": "end", "version": 1, "algorithm": "ddp"}'),
    "differ": records(*WHOLE, changed(HEAD, algorithm="topk", epochs=8)),
}
TIMELINE = {"kind": "timeline", "version": 1, "algorithm": "ddp", "rank": 0, "origin": 0.0, "levels": ["a"]}
TIMELINES = {
    "rank": {**TIMELINE, "rank": -1, "steps": []},
    "steps": {**TIMELINE, "steps": [[0, "a", 1]]},
    "levels": {**TIMELINE, "levels": 3, "steps": []},
    "exchange": {**TIMELINE, "steps": [], "exchanges": [[0] * 8]},
    "level": {**TIMELINE, "steps": [[0, 0.0, 1.0]], "exchanges": [[7, 0, 0, 0.0, 1.0, 1, False, []]]},
    "change": {**TIMELINE, "steps": [[0, 0.0, 1.0]], "changes": [[7, 0, {"period": 4}]]},
    "before": {**TIMELINE, "steps": [[0, 1.0, 0.0]]},
    "no-step": {**TIMELINE, "steps": [[-3, 0.0, 1.0]]},
}


def bombs(folder: Path) -> None:
    """Small files that are large when they are unpacked."""
    zeros = bytes(1 << 20)
    for name, member_name in (("bomb.zip", "train/cat/1.png"), ("binary-bomb.zip", "data_batch_1.bin")):
        with (
            zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open(member_name, "w", force_zip64=True) as file,
        ):
            for _ in range(256):
                file.write(zeros)
    with tarfile.open(folder / "bomb.tar.gz", "w:gz") as tar:
        member = tarfile.TarInfo("test/dog/1.png")
        member.size = 256 << 20
        tar.addfile(member, _Zeros(member.size))
    with gzip.open(folder / "header-bomb.tar.gz", "wb") as packed:
        member = tarfile.TarInfo("long")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 256 << 20
        packed.write(member.tobuf())
        for _ in range(256):
            packed.write(zeros)
    (folder / "idx").mkdir()
    with gzip.open(folder / "idx" / "train-images-idx3-ubyte.gz", "wb") as packed:
        for _ in range(256):
            packed.write(zeros)


class _Zeros(io.RawIOBase):
    """So many zeros."""

    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return bytes(size)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder full of odd things."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "file").write_text("text")
    (folder / "binary").write_bytes(BINARY)
    (folder / "script.py").write_text("print('a script')")
    (folder / "half.py").write_text("train(")
    (folder / "folder").mkdir()
    (folder / "sealed").mkdir(mode=0o555)
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(folder)
        listening.bind("socket")
    (folder / "full").symlink_to("/dev/full")
    (folder / "nowhere").symlink_to("not-there")
    (folder / "loop").symlink_to("loop")
    for name, text in RECORDS.items():
        (folder / "records" / name).mkdir(parents=True)
        (folder / "records" / name / "records.jsonl").write_text(text)
    for name, line in TIMELINES.items():
        (folder / "timelines" / name).mkdir(parents=True)
        (folder / "timelines" / name / "records.jsonl").write_text(records(*WHOLE))
        (folder / "timelines" / name / "timeline.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "binary-records").mkdir()
    (folder / "binary-records" / "records.jsonl").write_bytes(BINARY)
    (folder / "fifo-records").mkdir()
    os.mkfifo(folder / "fifo-records" / "records.jsonl")
    (folder / "good").mkdir()
    (folder / "good" / "records.jsonl").write_text(records(*WHOLE))
    (folder / "round").mkdir()
    (folder / "round" / "round").symlink_to(folder / "round")
    (folder / "pipes" / "train" / "cat").mkdir(parents=True)
    os.mkfifo(folder / "pipes" / "train" / "cat" / "1.png")
    bombs(folder)
    return folder


COMPARE = [
    ["nothing"],
    [""],
    [LONG],
    ["digits", "bytes"],
    ["--cluster", ""],
    ["--cluster", "x"],
    ["--cluster", "0x1"],
    ["--cluster", "1x0"],
    ["--cluster", "-1x2"],
    ["--cluster", "2x2@"],
    ["--cluster", "2x2@0mbit"],
    ["--cluster", "2x2@nanmbit"],
    ["--cluster", "2x2@1e9mbit"],
    ["--cluster", "2x2@100mbit,"],
    ["--cluster", "2x2@20ms,100mbit"],
    ["--cluster", "2x2@" + "9" * 400 + "gbit"],
    ["--cluster", "2x2@1gbit," + "9" * 400 + "s"],
    ["--cluster", "70000x1"],
    ["--cluster", "999999x999999"],
    ["--cluster", "9" * 5000 + "x1"],
    ["--cluster", "2x2+99999999"],
    ["--cluster", "local:99999999"],
    ["--cluster", "local:0"],
    ["--cluster", "local:2@100mbit"],
    ["--cluster", LONG],
    ["--cluster", "２x２"],
    ["--algorithms", ""],
    ["--algorithms", ","],
    ["--algorithms", "ddp,,topk"],
    ["--algorithms", "ddp,ddp"],
    ["--algorithms", "compute-only"],
    ["--algorithms", LONG],
    ["--algorithms", "topk:" + LONG],
    ["--algorithms", "topk:ratio=" + "9" * 5000],
    ["--algorithms", "topk:ratio=nan"],
    ["--algorithms", "topk:ratio=inf"],
    ["--algorithms", "topk:ratio="],
    ["--algorithms", "topk:=1"],
    ["--algorithms", "topk:ratio=0.1,ratio=0.2"],
    ["--algorithms", "localsgd:sync_every=1e3"],
    ["--algorithms", "qsgd:bits=-4"],
    ["--algorithms", "mp2:weights=/etc/passwd"],
    ["--algorithms", "mp2:weights=binary"],
    ["--algorithms", "mp2:weights=fifo"],
    ["--algorithms", "mp2:weights=folder"],
    ["--algorithms", "mp2:weights=" + "x" * 300],
    ["--algorithms", "wnn:weights=/etc/passwd"],
    ["--algorithms", "ps"],
    ["--servers", "1", "--algorithms", "ddp"],
    ["--servers", "-1"],
    ["--servers", HUGE, "--algorithms", "ps"],
    ["--servers", "1", "--cluster", "2x2+1", "--algorithms", "ps"],
    ["--epochs", "0"],
    ["--epochs", "-1"],
    ["--epochs", HUGE],
    ["--epochs", "1.5"],
    ["--target", "inf"],
    ["--target", "-0.1"],
    ["--seeds", "-1"],
    ["--seeds", HUGE],
    ["--seeds", str(2**63)],
    ["--timeout", "inf"],
    ["--timeout", "nan"],
    ["--timeout", "-1"],
    ["--timeout", "1e400"],
    ["--timeout", "1e300"],
    ["--out", ""],
    ["--out", "x" * 300],
    ["--out", "x/" * 3000],
    ["--out", "file"],
    ["--out", "file/below"],
    ["--out", "full"],
    ["--out", "fifo"],
    ["--out", "nowhere"],
    ["--out", "loop"],
    ["--out", "good"],
    ["--tensorboard", ""],
    ["--tensorboard", "file"],
    ["--tensorboard", "full"],
    ["--tensorboard", "loop"],
    ["--tensorboard", "x" * 300],
    ["bytes", "--model", "vit"],
    ["--limit", "5"],
    ["--precision", "bf16"],
    ["--data", "folder"],
    ["cifar10", "--model", LONG, "--data", "folder"],
    ["cifar10", "--limit", "-1", "--data", "folder"],
    ["cifar10", "--limit", HUGE, "--data", "bomb.zip"],
    ["cifar10", "--precision", "fp7", "--data", "folder"],
    ["cifar10", "--data", ""],
    ["cifar10", "--data", "not-there"],
    ["cifar10", "--data", "file"],
    ["cifar10", "--data", "binary"],
    ["cifar10", "--data", "fifo"],
    ["cifar10", "--data", "full"],
    ["cifar10", "--data", "/dev/zero"],
    ["cifar10", "--data", "loop"],
    ["cifar10", "--data", "round"],
    ["cifar10", "--data", "pipes"],
    ["cifar10", "--data", "x" * 300],
    ["cifar10", "--data", "bomb.zip"],
    ["cifar10", "--data", "binary-bomb.zip"],
    ["cifar10", "--data", "bomb.tar.gz"],
    ["cifar10", "--data", "header-bomb.tar.gz"],
    ["mnist", "--data", "idx"],
    ["mnist", "--data", "bomb.zip"],
    ["--unknown"],
    ["--" + LONG],
    ["--json=yes"],
]
RUN = [
    [],
    ["--"],
    ["--", ""],
    ["--", "not-there.py"],
    ["--", LONG],
    ["--", "folder"],
    ["--", "fifo"],
    ["--", "half.py"],
    ["--", "-m"],
    ["--", "-m", ""],
    ["--", "-m", "."],
    ["--", "-m", ".relative"],
    ["--", "-m", "not.there"],
    ["--", "-m", LONG],
    *(
        [*words, "--", "script.py"]
        for words in (
            ["--algorithm", ""],
            ["--algorithm", "topc"],
            ["--algorithm", "mp2:weights=/etc/passwd"],
            ["--algorithm", LONG],
            ["--algorithm", "ps"],
            ["--algorithm", "topk", "--servers", "1"],
            ["--cluster", "70000x1"],
            ["--cluster", "2x2+99999999"],
            ["--servers", "-1"],
            ["--servers", HUGE],
            ["--timeout", "inf"],
            ["--timeout", "0"],
            ["--timeout", "1e300"],
            ["--out", ""],
            ["--out", "x" * 300],
            ["--out", "file"],
            ["--out", "fifo"],
            ["--out", "full"],
            ["--out", "nowhere"],
            ["--tensorboard", "file"],
            ["--tensorboard", ""],
            ["--checkpoint", "file"],
            ["--checkpoint", "folder"],
            ["--checkpoint", "file", "--servers", "1", "--algorithm", "ps"],
            ["--checkpoint", "", "--servers", "1", "--algorithm", "ps"],
            ["--checkpoint", "x" * 300, "--servers", "1", "--algorithm", "ps"],
            ["--checkpoint-every", "inf"],
            ["--checkpoint-every", "-1"],
            ["--checkpoint-every", "nan"],
            ["--restarts", "-1"],
            ["--restarts", "1"],
            ["--restarts", HUGE, "--algorithm", "ps-async", "--servers", "1", "--cluster", "2x1"],
        )
    ),
]
REPORT = [
    [],
    [""],
    ["not-there"],
    ["file"],
    ["folder"],
    ["x" * 300],
    [LONG],
    ["binary-records"],
    ["fifo-records"],
    *(
        ["good", "--out", out]
        for out in ("", "folder", "full", "fifo", "socket", "loop", "x" * 300, "a/b.html")
    ),
    ["good", "--out", "/dev/null"],
    ["good", "--out", "/proc/self/mem"],
    *([f"records/{name}"] for name in RECORDS),
    *([f"timelines/{name}"] for name in TIMELINES),
]
PREDICTOR = [
    ["nothing"],
    ["record", "--seeds", HUGE],
    ["record", "--seeds", "-1"],
    ["record", "--seeds", "a"],
    ["record", "--seeds", ""],
    ["record", "--seeds", "1e3"],
    ["record", "--rates", "inf"],
    ["record", "--rates", "nan"],
    ["record", "--recipes", ""],
    ["record", "--recipes", LONG],
    ["record", "--models", LONG],
    ["record", "--rounds", "0"],
    ["record", "--rounds", HUGE],
    ["record", "--phases", "0"],
    ["record", "--length", "1"],
    ["record", "--every", "0"],
    ["record", "--elements", "0"],
    ["record", "--workers", "0"],
    ["record", "--workers", HUGE],
    ["record", "--share", "nan"],
    ["record", "--predictor", "/etc/passwd"],
    ["record", "--predictor", "not-there"],
    ["record", "--data", "not-there", "--recipes", "cifar10"],
    *(["record", "--out", out] for out in ("", "folder", "full", "fifo", "socket", "loop", "x" * 300, "a/b")),
    ["train", "not-there"],
    ["train", "file"],
    ["train", "binary"],
    ["train", "fifo"],
    ["train", ""],
    ["train", "--network", ""],
    ["train", "binary", "--seed", HUGE],
    ["train", "binary", "--steps", "0"],
    ["train", "binary", "--batch", HUGE],
    ["train", "binary", "--out", "full"],
    ["evaluate", "--candidates", ""],
    ["evaluate", "--candidates", LONG],
    ["evaluate", "--predictor", "/etc/passwd"],
    ["evaluate", "--predictor", "fifo"],
    ["evaluate", "--records", "binary"],
    ["evaluate", "--recipe", "x"],
    ["evaluate", "--epochs", "0"],
    ["evaluate", "--epochs", HUGE],
    ["evaluate", "--workers", "0"],
    ["evaluate", "--seed", HUGE],
    ["evaluate", "--within", "nan"],
    ["evaluate", "--moments", "0"],
    ["evaluate", "--out", "full"],
    ["evaluate", "--out", ""],
]
OTHERS = [[LONG], [""], ["--nothing"], ["list", "x"], ["list", "--json", "--json=1"], ["comparee"]]
CASES = [
    *(["compare", *words] for words in COMPARE),
    *(["run", *words] for words in RUN),
    *(["report", *words] for words in REPORT),
    *(["predictor", *words] for words in PREDICTOR),
    *OTHERS,
]


def named(words: list[str]) -> str:
    return " ".join(word if len(word) < 40 else f"{word[:10]}...{len(word)}" for word in words)


@pytest.fixture
def call(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], tuple[object, str, str]]:
    for start in STARTS:
        monkeypatch.setattr(start, _launch)
    monkeypatch.setenv("TACIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TACIT_ALGORITHM", raising=False)
    monkeypatch.chdir(place)

    def called(words: list[str]) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["tacit", *words])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code, *capsys.readouterr()

    return called


@pytest.mark.parametrize("words", CASES, ids=named)
def test_odd_input_is_one_line_and_nothing_is_launched(
    call: Callable[[list[str]], tuple[object, str, str]], place: Path, words: list[str]
) -> None:
    before = sorted(place.rglob("*"))
    code, _, err = call(words)
    assert code == 2, err
    assert "Traceback" not in err
    assert "another" not in err or "good" in words, "not for the reason that is meant"
    lines = [line for line in err.splitlines() if line and not line.startswith(("Usage: ", "Try "))]
    assert len(lines) == 1, err
    assert len(lines[0]) <= 1000, "as long as the input was"
    assert sorted(place.rglob("*")) == before, "something was made"


def test_a_bomb_takes_no_memory(call: Callable[[list[str]], tuple[object, str, str]], place: Path) -> None:
    """Each archive is 256 MiB when it is unpacked, and the address space may grow by half of that."""
    call(["compare", "cifar10", "--data", "file"])  # whatever is imported is imported now
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (128 << 20), before[1]))
    try:
        said = [
            call(["compare", recipe, "--data", name])
            for recipe, name in (
                ("cifar10", "bomb.zip"),
                ("cifar10", "binary-bomb.zip"),
                ("cifar10", "bomb.tar.gz"),
                ("cifar10", "header-bomb.tar.gz"),
                ("mnist", "idx"),
            )
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    for (code, _, err), why in zip(said, ("more than",) * 3 + ("no archive", "lacks"), strict=True):
        assert code == 2, err
        assert why in err


@pytest.mark.parametrize("words", [["compare", "digits"], ["run", "--", "script.py"], ["report", "good"]])
def test_a_working_directory_that_is_gone_is_said(
    call: Callable[[list[str]], tuple[object, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    code, _, err = call(words)
    monkeypatch.chdir(tmp_path)
    assert (code, err.count("\n")) == (2, 1), err
