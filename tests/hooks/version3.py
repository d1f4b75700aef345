"""Checkpoints of version 3: `write` made them with the tacit of that version, `read` goes on from them.

Gradients are differences, element by element, so that every machine has the same bits.

    version3.py write FILE   # rank 0 writes all cases, with what training on led to
    version3.py read FILE    # goes on from each, and prints how it compares
"""

import base64
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit

CASES = {
    "topk": ("topk:ratio=0.2", 3),
    "topk in phases": ("topk:ratio=0.2,warmup_steps=4", 3),
    "dgc": ("dgc:ratio=0.2", 5),
    "onebit": ("efsign", 3),
    "localsgd": ("localsgd:sync_every=4", 6),
    "diloco": ("diloco:sync_every=3", 4),
    "a round pending": ("overlap-localsgd:sync_every=4", 6),
    "in bf16": ("easgd:sync_every=2", 5),
    "streams": ("streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=1", 6),
    "pipesgd": ("pipesgd:compressor=bf16", 4),
    "predictive": ("predictive:sync_every=2", 5),
    "ednncomm": ("ednncomm:sync_every=3", 4),
    "daso": ("daso:warmup_epochs=0,cooldown_epochs=0", 6),
}
"""The algorithm, and after how many steps it is saved."""
EPOCHS = {"daso": {"steps_per_epoch": 50, "epochs": 4}}
MORE = 7


class Model(nn.Module):
    """Distances from what it is given, and a mean of what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, 42).view(6, 7))
        self.b = nn.Parameter(torch.linspace(0, 1, 5))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.get_buffer("seen").mul_(0.5).add_(x[:3], alpha=0.5)
        return ((self.w - x[:42].view(6, 7)) ** 2).sum() + ((self.b - x[42:]) ** 2).sum()


def given(rank: int, step: int) -> Tensor:
    """Multiples of 1 / 64, other ones on each rank and in each step."""
    return (torch.arange(47) * (37 + 11 * rank) + step * 29) % 64 / 64


class Training:
    """A model, its optimizer, and its session."""

    def __init__(self, case: str) -> None:
        algorithm, self.stop = CASES[case]
        self.model = DDP(Model().to(torch.bfloat16 if case == "in bf16" else torch.float32))
        momentum = {"momentum": 0.9, "weight_decay": 0.125} if case == "dgc" else {}
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.0625, **momentum)
        self.session = tacit.attach(self.model, self.sgd, algorithm, **EPOCHS.get(case, {}))

    def steps(self, first: int, count: int) -> None:
        for step in range(first, first + count):
            self.sgd.zero_grad()
            loss = self.model(given(dist.get_rank(), step).to(self.model.module.w.dtype))
            loss.backward()
            self.session.observe(float(step))  # the loss is a sum, whose bits machines may differ in
            self.sgd.step()

    def replica(self) -> dict[str, Any]:
        """What this rank has beside the session."""
        state: dict[str, Any] = {"model": {k: v.clone() for k, v in self.model.module.state_dict().items()}}
        buffers = [self.sgd.state.get(p, {}).get("momentum_buffer") for p in self.model.parameters()]
        return state | {"momentum": [None if each is None else each.clone() for each in buffers]}

    def resume(self, replica: dict[str, Any]) -> None:
        self.model.module.load_state_dict(replica["model"])
        for p, each in zip(self.model.parameters(), replica["momentum"], strict=True):
            if each is not None:
                self.sgd.state[p]["momentum_buffer"] = each.clone()


# ---- as text ------------------------------------------------------------------------------------------


def packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        raw = base64.b64encode(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {"tensor": raw, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if isinstance(value, dict):
        return {"dict": {key: packed(each) for key, each in value.items()}}
    return [packed(each) for each in value] if isinstance(value, list) else value


def unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: unpacked(each) for key, each in value["dict"].items()}
    raw = torch.frombuffer(bytearray(base64.b64decode(value["tensor"])) or bytearray(1), dtype=torch.uint8)
    return (
        raw[: len(base64.b64decode(value["tensor"]))]
        .view(getattr(torch, value["dtype"]))
        .view(value["shape"])
    )


# ---- the two ways -------------------------------------------------------------------------------------


def everybodys(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def write(file: Path) -> None:
    cases = {}
    for case in CASES:
        training = Training(case)
        training.steps(0, training.stop)
        states, before = everybodys(training.session.state_dict()), everybodys(training.replica())
        training.steps(training.stop, MORE)
        training.session.flush()
        after = everybodys(training.replica())
        cases[case] = {"state": tacit.join_states(states), "before": before, "after": after}
        training.session.close()
    if dist.get_rank() == 0:
        lines = [f"{json.dumps(case)}: {json.dumps(packed(each))}" for case, each in cases.items()]
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(file: Path) -> None:
    cases, rank = json.loads(file.read_text()), dist.get_rank()
    for case, each in cases.items():
        found = unpacked(each)
        training = Training(case)
        training.resume(found["before"][rank])
        training.session.load_state_dict(found["state"])
        saved = training.session.state_dict()
        training.steps(training.stop, MORE)
        training.session.flush()
        mine, theirs = training.replica(), found["after"][rank]
        same = all(torch.equal(mine["model"][name], theirs["model"][name]) for name in theirs["model"])
        training.session.close()
        keys = sorted(saved)
        print(json.dumps({"case": case, "same": same, "version": saved["version"], "keys": keys}), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
