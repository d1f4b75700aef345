"""A command parses each algorithm's text once in each process, and hands the value on."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from sample_records import DDP, HEAD

from tacit import algorithms
from tacit.algorithms import registry
from tacit.algorithms.options.text import split_text
from tacit_lab import cli
from tacit_lab.cluster import Cluster
from tacit_lab.recipes import worker
from tacit_lab.recipes.progress import line_of
from tacit_lab.testbed import Result
from tacit_lab.testbed.launch import free_port


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were parsed so far, by whatever name `parse` was imported."""
    texts: list[str] = []

    def counted(text: str) -> tuple[str, dict[str, str]]:
        texts.append(text)
        return split_text(text)

    monkeypatch.setattr(registry, "split_text", counted)
    algorithms.parse("ddp")
    assert texts.pop() == "ddp"
    return texts


class Bed:
    """A testbed in which every command ends well at once."""

    shaped = False

    def __init__(self, cluster: Cluster) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(
        self,
        argv: Sequence[str],
        on_line: Callable[[int, str], None] = lambda node, line: None,
        **_: object,
    ) -> Result:
        if "--algorithm" in argv:
            algorithm = argv[argv.index("--algorithm") + 1]
            for record in (HEAD, DDP):
                on_line(0, line_of(replace(record, algorithm=algorithm)))
        return Result(0, (), timed_out=False, seconds=1.0)


def tacit(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tacit", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("servers", [[], ["ps"]])
def test_compare(
    servers: list[str], parsed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit_lab.cli.compare.runner.Testbed", Bed)
    names = ["ddp", "topk:ratio=0.1,warmup_steps=5", "localsgd", *servers]
    words = ["--algorithms", ",".join(names), "--servers", len(servers), "--tensorboard", tmp_path / "curves"]
    assert tacit(monkeypatch, "compare", *words, "--out", tmp_path / "out") == 0
    assert parsed == names


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ([], []),
        (["--algorithm", "topk:ratio=0.1"], ["topk:ratio=0.1"]),
        (["--algorithm", "ps-async", "--servers", 1, "--restarts", 1], ["ps-async"]),
    ],
)
def test_run(
    words: list[object], texts: list[str], parsed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit_lab.testbed.Testbed", Bed)
    options = ["--cluster", "2x1", *words, "--out", tmp_path / "out"]
    code = tacit(monkeypatch, "run", *options, "--", __file__)
    assert code == (2 if texts else 0), "the script never called tacit"
    assert parsed == texts


def test_predictor(parsed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no algorithm as text."""
    words = [
        "--candidates",
        "stale",
        "--recipe",
        "made-up",
        "--model",
        "lenet",
        "--epochs",
        1,
        "--workers",
        8,
    ]
    assert tacit(monkeypatch, "predictor", "evaluate", *words, "--moments", 1) == 0
    assert parsed == []


@pytest.mark.parametrize(
    ("algorithm", "texts"), [("topk:ratio=0.1", ["topk:ratio=0.1"]), ("compute-only", [])]
)
def test_worker(algorithm: str, texts: list[str], parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Mapping[str, object] = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TACIT_INTERFACE", raising=False)
    words = ["--recipe", "digits", "--algorithm", algorithm, "--epochs", "1"]
    worker._train(worker._parser().parse_args(words))
    assert parsed == texts
