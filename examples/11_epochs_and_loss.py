"""Epochs and the loss: what daso asks for beside the two lines, marked 1, 2, 3; adacomm asks for 3 alone.

It learns to tell three spirals apart, in epochs of steps whose gradients are of two batches each. On this
machine, where all ranks are on one node and a warning says that this is plain DDP:

    torchrun --nproc-per-node 2 examples/11_epochs_and_loss.py

or on emulated machines, whose periods go by the loss:

    tacit run --cluster 2x2@100mbit --algorithm daso -- examples/11_epochs_and_loss.py
    tacit run --cluster 6x1@100mbit --algorithm adacomm:sync_every=8 -- examples/11_epochs_and_loss.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tacit

EPOCHS, BATCHES, ACCUMULATION = 12, 40, 2
os.environ.setdefault("TACIT_ALGORITHM", "daso")  # under plain torchrun


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of the plane, of shape (count, 2), and which of three spirals each lies on."""
    arm = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + 0.1 * torch.randn(count, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), arm


def main() -> None:
    """Train, and say how well it went and how often the ranks talked."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own

    with tacit.attach(
        model,
        optimizer,
        tacit.from_env(),
        steps_per_epoch=BATCHES // ACCUMULATION,  # <- 1: steps of the optimizer, not batches
        epochs=EPOCHS,  # <- 2
    ) as session:
        for _ in range(EPOCHS * BATCHES // ACCUMULATION):
            optimizer.zero_grad()
            with model.no_sync():
                first = half(model, mine)
            loss = first + half(model, mine)
            session.observe(loss)  # <- 3: of this step, before it is taken
            optimizer.step()

    x, arm = spirals(1000, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        accuracy = (network(x).argmax(1) == arm).float().mean().item()
    if dist.get_rank() == 0:
        told = session.metrics()
        print(f"accuracy {accuracy:.3f} after {told['steps']} steps and {told['rounds']} rounds")
    dist.destroy_process_group()


def half(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Forward and backward of one of the two batches of a step; its part of the loss."""
    x, arm = spirals(32, generator)
    loss = cross_entropy(model(x), arm) / ACCUMULATION
    loss.backward()
    return loss.detach()


if __name__ == "__main__":
    main()
