"""Local SGD: every rank trains alone, and the replicas are averaged every 8 steps. No gradient travels.

It fits a random teacher network with Adam, on data that each rank makes for itself. Run it on this machine:

    torchrun --nproc-per-node 2 examples/02_local_sgd.py

or on two emulated machines, and try how rarely the ranks need to talk:

    tacit run --cluster 2x2@100mbit --algorithm localsgd:sync_every=8  -- examples/02_local_sgd.py
    tacit run --cluster 2x2@100mbit --algorithm localsgd:sync_every=32 -- examples/02_local_sgd.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import tacit

STEPS = 240
os.environ.setdefault("TACIT_ALGORITHM", "localsgd:sync_every=8")  # under plain torchrun


def network(hidden: int) -> nn.Sequential:
    """A function of 32 numbers to 8."""
    return nn.Sequential(nn.Linear(32, hidden), nn.Tanh(), nn.Linear(hidden, 8))


def main() -> None:
    """Train, and say how near the student came to the teacher."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    teacher = network(64).requires_grad_(False)
    model = DistributedDataParallel(network(512), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own

    session = tacit.attach(model, optimizer, tacit.from_env())
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 32, generator=mine)
        loss = mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 80 == 0:
            session.sync()  # between rounds replicas differ: make them equal before you look at one
            test(f"step {step}", model, teacher)
    session.close()  # as leaving a `with` block does: the replicas end equal, and the hooks are gone

    if dist.get_rank() == 0:
        told = session.metrics()
        megabytes = told["bytes_out"] / 1e6
        print(f"{told['rounds']} rounds in {told['steps']} steps, {megabytes:.2f} MB sent by rank 0")
    dist.destroy_process_group()


def test(when: str, model: nn.Module, teacher: nn.Module) -> None:
    """Print the error on data that no rank trains on."""
    x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        error = mse_loss(model(x), teacher(x)) / teacher(x).var()
    if dist.get_rank() == 0:
        print(f"{when}: {error:.4f} of the variance is not explained")


if __name__ == "__main__":
    main()
