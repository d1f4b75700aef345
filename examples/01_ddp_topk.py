"""Gradient compression in a plain DDP script: the 1 % largest gradient entries travel, the rest is owed.

It trains a small network on handwritten digits (needs scikit-learn). Two lines are tacit's, marked 1 and 2.
Run it on this machine:

    torchrun --nproc-per-node 2 examples/01_ddp_topk.py

or on two emulated machines with links of 100 Mbit/s, where you see what it saves; compare with `ddp`:

    tacit run --cluster 2x2@100mbit --algorithm topk:ratio=0.01 -- examples/01_ddp_topk.py
    tacit run --cluster 2x2@100mbit --algorithm ddp             -- examples/01_ddp_topk.py
"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tacit  # <- 1

EPOCHS = 8
os.environ.setdefault("TACIT_ALGORITHM", "topk:ratio=0.01")  # under plain torchrun; `tacit run` sets its own


def digits() -> tuple[TensorDataset, TensorDataset]:
    """1,440 images to train on and 357 to test on, in an order that never changes."""
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(classes)[order]
    return TensorDataset(x[357:], y[357:]), TensorDataset(x[:357], y[:357])


def main() -> None:
    """Train, and say how well it went and what was sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = digits()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    with tacit.attach(model, optimizer, tacit.from_env()) as session:  # <- 2
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()

    x, y = test.tensors
    with torch.inference_mode():
        accuracy = (network(x).argmax(1) == y).float().mean().item()
    if dist.get_rank() == 0:
        told = session.metrics()
        print(session.active_path)
        print(f"accuracy {accuracy:.3f} after {told['steps']} steps")
        print(f"{told['compression']:.1f} times less sent than without compression")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
