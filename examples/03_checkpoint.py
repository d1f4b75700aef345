"""Checkpoints: a run that stops and goes on from a file ends, bit for bit, where a run without a stop does.

Each rank saves a file of its own, because what compression left over, which a rank still owes its peers, is
not the same on any two. It fits a random teacher network. Run it on this machine:

    torchrun --nproc-per-node 2 examples/03_checkpoint.py

or with another algorithm, on two emulated machines:

    tacit run --cluster 2x1@1gbit --algorithm localsgd:sync_every=8 -- examples/03_checkpoint.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

import tacit

STOP, END = 50, 120
os.environ.setdefault("TACIT_ALGORITHM", "topk:ratio=0.01")  # under plain torchrun


def network(hidden: int) -> nn.Sequential:
    """A function of 32 numbers to 8."""
    return nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 8))


def fresh() -> tuple[DistributedDataParallel, Optimizer]:
    """The model and the optimizer that every run begins with, or loads its checkpoint into."""
    torch.manual_seed(0)
    model = DistributedDataParallel(network(256), gradient_as_bucket_view=True)
    return model, Adam(model.parameters(), lr=2e-3)


def train(model: DistributedDataParallel, optimizer: Optimizer, first: int, stop: int) -> None:
    """The steps `first` to `stop` - 1; the step and the rank decide the data, so that a run can go on."""
    torch.manual_seed(1)
    teacher = network(64).requires_grad_(False)
    for step in range(first, stop):
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        optimizer.zero_grad()
        mse_loss(model(x), teacher(x)).backward()
        optimizer.step()


def without_a_stop() -> nn.Module:
    """Train from the beginning to the end."""
    model, optimizer = fresh()
    with tacit.attach(model, optimizer, tacit.from_env()):
        train(model, optimizer, 0, END)
    return model


def until_the_stop(file: Path) -> None:
    """Train for a while, and save all that is needed to go on."""
    model, optimizer = fresh()
    with tacit.attach(model, optimizer, tacit.from_env()) as session:
        train(model, optimizer, 0, STOP)
        states = {"model": model.module, "optimizer": optimizer, "tacit": session}
        torch.save({name: each.state_dict() for name, each in states.items()}, file)


def from_the_stop(file: Path) -> nn.Module:
    """Load it, and train to the end."""
    model, optimizer = fresh()
    with tacit.attach(model, optimizer, tacit.from_env()) as session:
        saved = torch.load(file)
        for name, each in {"model": model.module, "optimizer": optimizer, "tacit": session}.items():
            each.load_state_dict(saved[name])
        train(model, optimizer, STOP, END)
    return model


def main() -> None:
    """Train without and with a stop, and compare the parameters."""
    dist.init_process_group("gloo")
    never = without_a_stop()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{dist.get_rank()}.pt"
        until_the_stop(file)
        megabytes = file.stat().st_size / 1e6
        stopped = from_the_stop(file)

    pairs = zip(never.parameters(), stopped.parameters(), strict=True)
    same = all(torch.equal(a, b) for a, b in pairs)
    if dist.get_rank() == 0:
        print(f"saved {megabytes:.2f} MB a rank after {STOP} steps, and went on to step {END}")
        print(f"the parameters are {'the same, bit for bit' if same else 'NOT the same'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
