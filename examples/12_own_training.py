"""A training of one's own under `tacit compare`: what it adds are the lines marked 1 to 4.

It trains a small network on handwritten digits (needs scikit-learn), with a method of one's own
(`examples/my_rows.py`) among the algorithms, each with three seeds:

    tacit compare --cluster 4x1@100mbit --algorithms ddp,topk,lowbit,mine --import my_rows --seeds 0..2 \\
        -- examples/12_own_training.py

`tacit.trial()` and `tacit.report` do nothing elsewhere, so it runs as before:

    torchrun --nproc-per-node 2 examples/12_own_training.py
    tacit run --cluster 2x1@100mbit --algorithm topk -- examples/12_own_training.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tacit

EPOCHS, HELD_OUT = 6, 357


def main() -> None:
    """Train, and report after each epoch."""
    dist.init_process_group("gloo")
    asked = tacit.trial()  # <- 1: the seed, and a factor on the learning rate
    torch.manual_seed(asked.seed)
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(classes)[order]
    train = TensorDataset(x[HELD_OUT:], y[HELD_OUT:])
    sampler = DistributedSampler(train, shuffle=True, seed=asked.seed)
    loader = DataLoader(train, batch_size=16, sampler=sampler)
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * asked.rate, momentum=0.9)

    step = 0
    with tacit.attach(model, optimizer, tacit.from_env()):  # <- 2 and 3
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in loader:
                optimizer.zero_grad()
                cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                step += 1
            with torch.inference_mode():
                outputs = network(x[:HELD_OUT])
            right = (outputs.argmax(1) == y[:HELD_OUT]).float().mean()
            tacit.report(step, loss=cross_entropy(outputs, y[:HELD_OUT]), accuracy=right)  # <- 4
    if dist.get_rank() == 0:
        print(f"accuracy {right:.3f} after {step} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
