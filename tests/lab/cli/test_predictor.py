"""`tacit predictor` as it is typed: record, train, evaluate, on the smallest trainings that there are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tacit.errors import ConfigError
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.mp2 import MP2
from tacit.prediction.networks.wnn import WNN
from tacit_lab.cli.application import app

LITTLE = ["--recipes", "made-up", "--models", "lenet", "--hold-model", "none", "--hold-data", "none"]
SHORT = ["--rates", "1", "--rounds", "24", "--phases", "2", "--elements", "8"]


def run(*words: object) -> str:
    """What it prints; raises what it raises."""
    done = CliRunner().invoke(app, ["predictor", *map(str, words)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: object) -> str:
    """Why it cannot be."""
    with pytest.raises(ConfigError) as error:
        CliRunner().invoke(app, ["predictor", *map(str, words)], catch_exceptions=False)
    return str(error.value)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("record") / "r.safetensors"
    told = run("record", *LITTLE, *SHORT, "--out", out)
    assert "made-up lenet, rate 1, seed 0: 20 layers" in told
    return out


def test_what_was_recorded_is_learnt_and_judged(recorded: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "mine.pt", tmp_path / "page.html"
    run("train", recorded, "--steps", 6, "--batch", 64, "--width", 2, "--gains", 0.5, "--out", out)
    assert set(MP2(str(out)).kinds()) == {"convolution", "linear", "vector"}
    note = weight_files.note_of(out)
    assert (
        f"tacit predictor train {recorded} --network mp2 --width 2 --steps 6 --batch 64 --seed 0 --gains 0.5"
        in note
    )
    assert "made-up lenet, rate 1, seed 0" in note
    words = [
        "--predictor",
        out,
        "--candidates",
        "stale",
        "--recipe",
        "made-up",
        "--epochs",
        1,
        "--workers",
        8,
    ]
    told = run("evaluate", *words, "--moments", 1, "--out", page, "--json")
    judged = json.loads(told.splitlines()[-1])
    assert [row["name"] for row in judged["rows"]] == [str(out), "stale"]
    still = judged["rows"][1]
    assert still["errors"]["linear"] == pytest.approx(1.0)
    assert still["operations"] == 0
    assert still["within"] == (still["loss"] <= judged["loss"] * 1.02)
    text = page.read_text()
    assert "tacit predictor evaluate" in text
    assert 'id="path-3"' in text


def test_wnn_learns_from_the_same_records(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.pt"
    run("train", recorded, "--network", "wnn", "--period", 1, "--steps", 2, "--batch", 16, "--out", out)
    assert "linear" in WNN(str(out)).kinds()


def test_a_loop_can_be_recorded(recorded: Path, tmp_path: Path) -> None:
    from tacit_lab.predictor_training.dataset import load

    made, out = tmp_path / "m.pt", tmp_path / "loop.safetensors"
    run(
        "train",
        recorded,
        "--steps",
        2,
        "--batch",
        16,
        "--width",
        1,
        "--gains",
        1,
        "--out",
        made,
    )
    run("record", *LITTLE, *SHORT, "--predictor", made, "--out", out)
    layers = [layer for layer in load(out) if layer.name == "7.weight"]
    alone = [layer for layer in load(recorded) if layer.name == "7.weight"]
    assert torch.equal(layers[0].changes[0], alone[0].changes[0]), "in the first round all is pushed"
    assert not any(
        torch.equal(*pair)
        for pair in zip(*([x.changes for x in each] for each in (layers, alone)), strict=True)
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["record", "--recipes", "digit"], "unknown recipe 'digit'. Did you mean 'digits'"),
        (["record", "--models", "resnet"], "unknown model 'resnet'. Did you mean 'resnet8'"),
        (["record", "--models", "alexnet,lenet"], "what is held out is not learnt from"),
        (["record", "--hold-data", "mnist"], "mnist cannot be held out"),
        (["record", "--recipes", "digits", "--hold-model", "none"], "nothing is left to learn from"),
        (["record", "--rates", "fast"], "--rates 'fast' is no list of numbers"),
        (["record", "--seeds", "-1"], "--seeds '-1' is no list"),
        (["record", "--rounds", "3"], "rounds=3 is not a whole number, 18 or more"),
        (["record", "--every", "0"], "every=0"),
        (["record", "--share", "2"], "share=2.0 is not in"),
        (["record", "--data", "images"], "record one of them at a time"),
        (
            ["record", "--out", "absent/r.safetensors"],
            "cannot write --out absent/r.safetensors: there is no folder",
        ),
        (["train", "absent.safetensors"], "there is no record of trainings absent.safetensors"),
        (["train", "--network", "wmm"], "unknown network 'wmm'. Known: mp2, wnn"),
        (["train", "--network", "wnn", "--width", "4"], "--width 4 would do nothing for wnn"),
        (["train", "--period", "4"], "--period 4 would do nothing for mp2"),
        (["train", "--network", "wnn", "--gains", "1"], "--gains 1 would do nothing for wnn"),
        (["train", "--gains", "much"], "--gains 'much' is no list of numbers"),
        (["train", "--tried-on", "resnet"], "unknown model 'resnet'"),
        (["train", "--sync-every", "99"], "write more epochs"),
        (["train", "--out", "absent/m.pt"], "cannot write --out absent/m.pt: there is no folder"),
        (["evaluate", "--predictor", "absent.pt"], "there is no predictor file absent.pt"),
        (["evaluate", "--candidates", "mp3"], "unknown candidate 'mp3'"),
        (["evaluate", "--candidates", ""], "there is nothing to evaluate"),
        (["evaluate", "--candidates", "stale", "--epochs", "0"], "epochs=0"),
        (["evaluate", "--candidates", "stale", "--workers", "0"], "workers=0"),
        (["evaluate", "--candidates", "stale", "--within", "-1"], "within=-1.0"),
        (["evaluate", "--candidates", "stale", "--sync-every", "90"], "and 12 are needed"),
        (["evaluate", "--candidates", "stale", "--share", "0"], "share=0.0"),
        (
            ["evaluate", "--candidates", "stale", "--records", "absent"],
            "there is no record of trainings absent",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tacit_lab.predictor_training.simulation.Simulation.rounds", None)
    assert says in refused(*words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--width", 9], "width=9 costs"),
        (["--width", 0], "width=0"),
        (["--loss", "l2"], "unknown loss 'l2'"),
        (["--steps", 0], "steps=0"),
        (["--share", 0], "share=0.0"),
        (["--gains", 2, "--steps", 1, "--batch", 9], "gain=2.0 is not in"),
        (["--network", "wnn", "--period", 20], "period=20 needs records of 180 rounds"),
    ],
)
def test_what_cannot_be_learnt_is_refused(
    words: list[object], says: str, recorded: Path, tmp_path: Path
) -> None:
    assert says in refused("train", recorded, *words, "--out", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_a_damaged_predictor_is_refused(tmp_path: Path) -> None:
    damaged: list[tuple[Callable[[Path], object], str]] = [
        (lambda path: path.write_bytes(b"nonsense"), "is damaged, or no predictor file"),
        (
            lambda path: weight_files.write(path, "cnn", {"linear": {}}),
            "for the network 'cnn', and known are",
        ),
        (
            lambda path: weight_files.write(path, "mp2", {"attention": {}}),
            "of kind 'attention', and known are",
        ),
        (lambda path: weight_files.write(path, "mp2", {"linear": {}}), "should hold first.weight"),
    ]
    for i, (write, says) in enumerate(damaged):
        write(tmp_path / f"{i}.pt")
        assert says in refused("evaluate", "--predictor", tmp_path / f"{i}.pt")
