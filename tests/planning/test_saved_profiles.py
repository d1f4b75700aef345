"""Profiles: taken of a real loop, saved, read, and refused where they are of something else."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import made_training as made
import pytest
import torch
from torch import nn

from tacit import moments
from tacit.errors import ConfigError
from tacit.kernels.dispatch import emulated_device
from tacit.planning import step_timer
from tacit.planning.profile import Launching, Profile
from tacit.planning.step_timer import StepTimer


def test_a_profile_is_read_as_it_was_saved(tmp_path: Path) -> None:
    profile = made.with_cost(made.profile(), "topk", 4, 1, 0.001)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile


def test_a_profile_that_an_earlier_version_saved_is_read() -> None:
    """It has a checksum, and not yet the ranks that share a replica."""
    saved = Path(__file__).parents[2] / "benchmarks/results/2026-11-29-gpu-profile-made-up.json"
    text = saved.read_text()
    assert '"checksum"' in text
    assert '"shards"' not in text
    assert Profile.load(saved).shards == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"form": 2}', '{"form": 1, "step": {}}', made.profile().to_json()[:-20]]
)
def test_another_text_is_no_profile(text: str) -> None:
    with pytest.raises(ConfigError, match="tacit profile"):
        Profile.from_json(text)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"per_byte": 0.0', '"per_byte": -1', "it.per_byte is -1, where 0 or more belongs"),
        ('"threads": 1', '"threads": 0', "it.threads is 0, where 1 to"),
        ('"float32"', '"manual_seed"', "of a type that torch does not have"),
        ('"ranks": 1', '"ranks": 2', "its checksum"),
    ],
)
def test_what_cannot_be_is_refused(before: str, after: str, says: str) -> None:
    text = made.profile().to_json()
    assert before in text
    if says != "its checksum":
        text = re.sub(r', "checksum": \d+', "", text)
    with pytest.raises(ConfigError, match=f"no profile .*{says}"):
        Profile.from_json(text.replace(before, after))


def test_a_profile_of_another_model_names_what_differs() -> None:
    named = {name: torch.empty(shape) for name, shape in made.SHAPES.items()}
    made.profile().check_model(named)
    with pytest.raises(ConfigError, match=r"'second\.bias'"):
        made.profile().check_model({**named, "second.bias": torch.empty(3)})


def slow(_: object, seconds: float) -> None:
    """Keep the processor busy."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_steps_are_timed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = dict(model.named_parameters())
    timer = StepTimer(model, [optimizer], named)
    model[0].register_forward_hook(lambda *_: slow(None, 0.004))
    model[1].weight.register_hook(lambda grad: slow(None, 0.006))
    for _ in range(5):
        time.sleep(0.03)
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    timer.close()
    found = timer.profile(skipped=1)
    assert len(timer.steps) == 4, "the first has no beginning"
    assert 0.004 <= found.forward < 0.02
    assert 0.006 <= found.backward < 0.03
    assert found.loading >= 0.025, "the loop slept, as if it waited for a loader"
    assert found.data >= found.loading
    ready = {each.name: each.ready for each in found.parameters}
    assert ready["0.weight"] > ready["1.weight"] >= 0.006, "the last layer's gradient is there first"
    assert [each.name for each in found.parameters] == [*named]
    before = len(timer.steps)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert len(timer.steps) == before, "a closed timer times nothing"


class Gpu:
    """A clock that work queued by the host moves on, as a GPU's does; it is never behind the host's.

    The host's is made as well: it stands still but for what the test says.
    """

    def __init__(self) -> None:
        self.now = self.host = 0.0

    def launch(self, seconds: float) -> None:
        """Queue work of so many seconds."""
        self.now = max(self.now, self.host) + seconds

    def event(self, **_: object) -> SimpleNamespace:
        """As `torch.cuda.Event`."""
        made = SimpleNamespace(synchronize=lambda: None)

        def record(stream: object) -> None:
            made.at = self.now = max(self.now, self.host)

        made.record, made.elapsed_time = record, lambda later: 1e3 * (later.at - made.at)
        return made


@pytest.mark.parametrize("host", [0.0, 0.02], ids=["the GPU is behind", "the host is behind"])
def test_steps_on_a_gpu_are_timed_by_its_clock(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = SimpleNamespace(perf_counter=lambda: gpu.host, thread_time=lambda: gpu.host)
    monkeypatch.setattr(step_timer, "time", clock)
    monkeypatch.setattr(moments, "time", clock)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with emulated_device():
        timer = StepTimer(model, [optimizer], dict(model.named_parameters()))

    def computing(*_: object) -> None:
        gpu.host += host
        gpu.launch(0.001 if host else 0.1)

    model[0].register_forward_hook(computing)
    model[1].weight.register_hook(lambda grad: gpu.launch(0.2))
    optimizer.register_step_pre_hook(lambda *_: gpu.launch(0.04))  # after the timer's: the optimizer's work
    gpu.launch(1.0)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch(cycles / 2e9))
    for number in range(5):
        if number == 4:
            timer.run_ahead()
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        gpu.launch(0.3)  # an exchange
        optimizer.step()
        optimizer.zero_grad()
        if host:
            gpu.host = max(gpu.host, gpu.now)  # as .item() would
    assert len(timer.steps) == 3, "neither the first nor the one that is queued"
    assert timer.queued == pytest.approx(0.201 if host else 0.3)
    step = timer.steps[-1]
    assert step.backward == pytest.approx(0.2)
    assert step.ready["0.weight"] == pytest.approx(0.2)
    assert step.ready["1.weight"] == pytest.approx(0.2)
    assert step.exchanging == pytest.approx(0.3)
    assert step.optimizer == pytest.approx(0.04)
    if host:
        assert step.forward == pytest.approx(step.launching.forward + 0.001), "the GPU waits for the host"
        assert step.launching == Launching(pytest.approx(host), 0.0, 0.0)
        assert timer.launching == step.launching
    else:
        assert step.forward == pytest.approx(0.1)
        assert step.launching.seconds < 0.05
        assert step.data == pytest.approx(0.0)
        assert step.wall == pytest.approx(0.64)


def test_no_step_is_an_error_that_says_what_is_missing() -> None:
    model = nn.Linear(2, 2)
    timer = StepTimer(model, [], dict(model.named_parameters()))
    with pytest.raises(ConfigError, match=r"optimizer\.step"):
        timer.profile()
