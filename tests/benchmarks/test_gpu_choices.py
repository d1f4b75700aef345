"""The part of `gpu.py` that has `auto` choose over an emulated wire, tried without a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from made_gpu import made_gpu
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from gpu_auto import MEASURED, chosen, taken, told
from gpu_steps import PEERS, Training
from made_up_gpu import compared
from tacit.planning import step_profiler
from tacit.planning.profile import Profile
from tacit.transports import torch_distributed as transport


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(transport, "ALONE_TOO", True)
    yield
    dist.destroy_process_group()


class Small(Training):
    """A model that a CPU trains in no time."""

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()


@pytest.mark.usefixtures("alone")
def test_a_profile_of_a_gpu_has_what_auto_may_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TACIT_STEP_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.setattr(step_profiler, "_TAKEN", [])
    with made_gpu():
        model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
        optimizer = torch.optim.AdamW(model.parameters())
        with tacit.attach(model, optimizer, "dense") as session:
            each = Small(model, optimizer, session, torch.randn(16, 64))
            for _ in range(17):
                each.step()
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.gpu is not None
    assert profile.gpu.name == "a made GPU"
    assert profile.gpu.launching.seconds > 0
    assert profile.threads == 1
    measured = {cost.algorithm for cost in profile.costs}
    assert {"ddp", "int8", "lowbit", "zeroone-adam"} <= measured
    assert not {"topk:ratio=0.01", "powersgd"} & measured, "they do not fit AdamW"
    assert {(cost.nodes, cost.ranks) for cost in profile.costs} == {(1, 1), (2, 1)}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("gbit", "few"), [(1e-3, True), (1e9, False)])
def test_one_rank_is_told_the_wire_and_chooses_by_it(gbit: float, few: bool) -> None:
    with made_gpu(), told(gbit):
        model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        choice = chosen(Small(model, optimizer, None, torch.randn(16, 64)))
    assert (choice.algorithm not in ("ddp", "dense")) == few, choice
    assert len(choice.considered) == len(MEASURED)


@pytest.mark.usefixtures("alone")
def test_a_profile_taken_there_predicts_steps_over_the_wire(tmp_path: Path) -> None:
    with made_gpu():
        model = DDP(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        each = Small(model, optimizer, None, torch.randn(16, 64))
        profile = taken(each, ["dense", "topk"], tmp_path / "profile.json")
    rows = [{"algorithm": name, "gbit": 1e-3, "peers": PEERS, "ms": 1.0} for name in ("dense", "topk")]
    (_, _, dense, _), (_, _, topk, _) = compared(profile, rows)
    wire = 2 * (PEERS - 1) / PEERS * profile.model_bytes * 8 / 1e6
    assert dense == pytest.approx(profile.step.seconds + wire, rel=0.1)
    assert topk < dense / 4
