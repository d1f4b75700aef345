"""`tacit predictor record -- SCRIPT`: the user's own training is recorded, as it is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from forks import COMMAND, Fork
from tacit.environment import RECORD
from tacit.errors import ConfigError
from tacit_lab.cli.application import app
from tacit_lab.cli.predictor import runner
from tacit_lab.predictor_training import dataset, script
from tacit_lab.predictor_training.layers import Layer
from tacit_lab.predictor_training.runs import Sampling
from tacit_lab.predictor_training.script import ScriptRecorder

SCRIPT = """
import sys
import torch
from torch import nn
import beside

assert __name__ == "__main__"
steps, rate = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
other = torch.optim.Adam(nn.Linear(2, 2).parameters())
for step in range(steps):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().mean().backward()
    optimizer.step()
    if step == 3:
        other.step()
if "fail" in sys.argv:
    sys.exit(7)
sys.exit(0)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def trained(sampling: Sampling, steps: int, seed: int = 0) -> tuple[ScriptRecorder, list[dict[str, Any]]]:
    """A recorder that has seen a training; and the parameters before it and after each step."""
    recorder = ScriptRecorder("mine", sampling, seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    with recorder.watching():
        for step in range(steps):
            trace.append({name: p.detach().clone() for name, p in model.named_parameters()})
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            model(torch.randn(3, 1, 4, 4)).square().mean().backward()
            optimizer.step()
    trace.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return recorder, trace


def test_every_element_is_recorded_as_it_moved_over_each_round() -> None:
    sampling = Sampling(rounds=12, phases=2, length=18, every=2, elements=1000)
    recorder, trace = trained(sampling, 40)
    layers = recorder.layers()
    assert [(layer.name, layer.kind, layer.phase) for layer in layers] == [
        (name, kind, phase)
        for phase in (0, 1)
        for name, kind in (("0", "convolution"), ("1", "vector"), ("2", "linear"))
    ]
    for layer in layers:
        first = 0 if layer.phase == 0 else 12
        assert layer.steps.tolist() == [2 * (first + i) + 2 for i in range(6)]
        torch.testing.assert_close(layer.lr, 0.1 / layer.steps.float())
        name = ("0.weight", "0.bias", "2.weight")[int(layer.name)]
        for i, change in enumerate(layer.changes):
            at = 2 * (first + i)
            moved = (trace[at + 2][name] - trace[at][name]).reshape(-1)
            assert torch.equal(change.sort().values, moved.sort().values)
    assert recorder.steps == 40


def test_a_phase_that_is_cut_short_is_left_out_and_the_seed_decides_the_elements() -> None:
    sampling = Sampling(rounds=14, phases=2, every=1, elements=3)
    recorder, _ = trained(sampling, 12)
    assert {layer.phase for layer in recorder.layers()} == {0}
    assert all(layer.changes.shape == (7, 3) for layer in recorder.layers())
    again, other = (trained(sampling, 12, seed)[0].layers() for seed in (0, 1))
    for mine, same, different in zip(recorder.layers(), again, other, strict=True):
        assert torch.equal(mine.changes, same.changes)
        assert not torch.equal(mine.changes, different.changes)


def test_nothing_is_seen_outside_and_of_a_second_optimizer_it_is_told() -> None:
    recorder = ScriptRecorder("mine", Sampling(rounds=6, phases=1, every=1))
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    first, second = (torch.optim.SGD([p], lr=0.1) for p in params)
    first.step()
    with recorder.watching():
        assert recorder.layers() == []
        for _ in range(6):
            first.step()
            second.step()
    first.step()
    assert (recorder.steps, recorder.others) == (6, 1)
    assert [layer.shape for layer in recorder.layers()] == [(3,)]


def test_a_script_is_run_as_python_would_and_told_of(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(rounds=6, phases=1, every=2)
    layers = recorded(train, tmp_path, monkeypatch, sampling, "20", "0.1")
    assert {layer.run for layer in layers} == {"mine"}
    assert len(layers) == 4
    assert all(layer.changes.shape[0] == 6 and bool(layer.changes.any()) for layer in layers)
    with pytest.raises(SystemExit) as end:
        recorded(train, tmp_path, monkeypatch, sampling, "20", "0.1", "fail")
    assert end.value.code == 7


def recorded(
    train: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, *words: str
) -> list[Layer]:
    """What is recorded of a script that runs in this process."""
    for name, value in script.variables(folder, "mine", sampling, 0).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    script.main([str(train), *words])
    assert RECORD not in os.environ
    layers, others = script.collected(folder, sampling)
    assert others == 1
    return layers


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("0", "0.1"), "no optimizer of torch.optim made a step"),
        (("11", "0.1"), "the script made 11 steps, which are 5 rounds of 2, and no phase of 6 rounds"),
        (("40", "1e30"), "the training did not stay finite"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused(
    words: tuple[str, str], says: str, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=says):
        recorded(train, tmp_path, monkeypatch, Sampling(rounds=18, phases=3, every=2), *words)


def test_other_ranks_train_and_record_nothing(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        recorded(train, tmp_path, monkeypatch, Sampling(), "3", "0.1")
    assert not end.value.code
    with pytest.raises(ConfigError, match=r"as with os\._exit: have it end as usual"):
        script.collected(tmp_path, Sampling())


def test_torchrun_is_given_the_recorder_in_place_of_the_script() -> None:
    name = "tacit_lab.predictor_training.script"
    run = [sys.executable, "-m", "torch.distributed.run"]
    plain = ["torchrun", "--nproc-per-node", "2", "train.py", "--epochs", "3"]
    assert script.command(plain) == [*run, "--nproc-per-node", "2", "-m", name, "train.py", "--epochs", "3"]
    module = ["torchrun", "--standalone", "-m", "mine.train", "-m", "3"]
    assert script.command(module) == [*run, "--standalone", "-m", name, "-m", "mine.train", "-m", "3"]
    assert script.command(["train.py", "3"]) == [sys.executable, "-m", name, "train.py", "3"]
    with pytest.raises(ConfigError, match="torchrun --no-python"):
        script.command(["torchrun", "--no-python", "train.py"])


def invoke(*words: object) -> int:
    done = CliRunner().invoke(app, ["predictor", "record", *map(str, words)], catch_exceptions=False)
    return done.exit_code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--recipes", "digits", "--workers", 2], "--recipes, --workers with a script would do nothing"),
        (["--seeds", "0,1"], "--seeds 0,1 with a script: it runs once"),
        (["--rounds", 5], "rounds=5"),
        (["--out", "/dev/null"], "cannot write --out /dev/null"),
    ],
)
def test_options_that_do_not_fit_a_script_are_refused(words: list[object], says: str, train: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        invoke(*words, "--", train)


def test_a_script_must_be_there() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no script 'gone\.py' .* tacit predictor record -- train\.py"
    ):
        invoke("--", "gone.py")


@pytest.mark.parametrize(("ended", "code"), [(3, 3), (-15, 143)])
def test_a_script_that_fails_gives_its_exit_code_and_no_file(
    ended: int, code: int, train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            assert json.loads(env[RECORD])["sampling"]["every"] == 1

        def __enter__(self) -> Ended:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> int:
            return ended

    monkeypatch.setattr(runner.subprocess, "Popen", Ended)
    out = tmp_path / "r.safetensors"
    assert invoke("--every", 1, "--out", out, "--", train) == code
    assert not out.exists()


def forked(command: list[str], env: dict[str, str]) -> Fork:
    """The process of a command, and all of its own, as forks of one that has imported torch."""
    words = command[1:]
    if words[:2] == ["-m", "torch.distributed.run"]:
        words[:2] = ["-u", COMMAND, "torchrun"]
    return Fork([sys.executable, *words], env=env)


def test_a_script_in_processes_is_recorded_and_learnt_from(
    train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "subprocess", SimpleNamespace(Popen=forked))
    out, made = tmp_path / "r.safetensors", tmp_path / "mine.pt"
    sizes = ["--every", 1, "--rounds", 12, "--phases", 2]
    ranks = ["torchrun", "--standalone", "--nproc-per-node", 2]
    assert invoke(*sizes, "--out", out, "--", *ranks, train, 20, 0.1) == 0
    layers = dataset.load(out)
    assert len(layers) == 8
    assert layers[0].run == f"torchrun --standalone --nproc-per-node 2 {train} 20 0.1"
    learn = ["train", out, "--steps", 2, "--batch", 16, "--width", 1, "--gains", 1, "--out", made]
    done = CliRunner().invoke(app, ["predictor", *map(str, learn)], catch_exceptions=False)
    assert done.exit_code == 0
    assert made.exists()
    assert invoke(*sizes, "--out", tmp_path / "no", "--", train, 20, 0.1, "fail") == 7
    assert not (tmp_path / "no").exists()
