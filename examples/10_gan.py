"""A GAN: two models that train in turn, each with an optimizer and a session of its own.

The generator learns a ring of eight clusters of points. Each of the two models is in DDP, and each is
attached. In the generator's step the discriminator is called without DDP, with its parameters frozen: it gets
no gradients then, so nothing of it is exchanged. Run it on this machine:

    torchrun --nproc-per-node 2 examples/10_gan.py

or on four emulated nodes:

    tacit run --cluster 4x1@100mbit --algorithm int8 -- examples/10_gan.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as judged
from torch.nn.parallel import DistributedDataParallel

import tacit

STEPS, BATCH, NOISE, WIDTH = 900, 128, 8, 128
os.environ.setdefault("TACIT_ALGORITHM", "int8")  # under plain torchrun


def network(inputs: int, outputs: int) -> nn.Module:
    """Three layers."""
    return nn.Sequential(
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, outputs),
    )


def ring(count: int, generator: torch.Generator) -> Tensor:
    """Points of shape (count, 2), around eight places on the unit circle."""
    angle = torch.randint(0, 8, (count,), generator=generator) * math.pi / 4
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


def main() -> None:
    """Train, and say how many of the clusters are found and what was sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    maker = DistributedDataParallel(network(NOISE, 2), gradient_as_bucket_view=True)
    judge = DistributedDataParallel(network(2, 1), gradient_as_bucket_view=True)
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    real, made = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

    with (
        tacit.attach(maker, makes, tacit.from_env()) as of_maker,
        tacit.attach(judge, judges, tacit.from_env()),
    ):
        for _ in range(STEPS):
            with torch.no_grad():
                points = maker.module(torch.randn(BATCH, NOISE, generator=mine))
            judges.zero_grad()
            both = torch.cat([ring(BATCH, mine), points])  # one forward pass: DDP counts them
            judged(judge(both), torch.cat([real, made])).backward()
            judges.step()

            makes.zero_grad()
            judge.module.requires_grad_(False)
            judged(judge.module(maker(torch.randn(BATCH, NOISE, generator=mine))), real).backward()
            judge.module.requires_grad_(True)
            makes.step()

    with torch.no_grad():
        points = maker.module(torch.randn(4000, NOISE, generator=torch.Generator().manual_seed(0)))
    angles = torch.arange(8) * math.pi / 4
    distance, nearest = torch.cdist(points, torch.stack([angles.cos(), angles.sin()], 1)).min(1)
    found = sum(int((nearest[distance < 0.25] == place).sum() > 50) for place in range(8))
    if dist.get_rank() == 0:
        told = of_maker.metrics()
        near = (distance < 0.25).float().mean()
        print(
            f"{found} of 8 clusters found, {near:.2f} of the points are near one, after {told['steps']} steps"
        )
        print(f"the generator's gradients took {told['bytes_out'] / 1e6:.2f} MB a rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
