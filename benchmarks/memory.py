"""What ranks keep between two steps beside model, gradients and optimizer, by `session.footprint()`.

    torchrun --standalone --nproc-per-node 4 benchmarks/memory.py [ALGORITHM ...]

Ten layers of a million parameters, 40 MB, in DDP's buckets of 25 MB. Rank 0 prints what its tensors take, in
sizes of the model.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tacit
from arms import ranks

ALGORITHMS = [
    *("dense", "bf16", "qsgd", "topk", "powersgd", "efsign", "int8", "onebit-adam:freeze_step=2", "dgc"),
    *("localsgd:sync_every=2", "diloco:sync_every=2", "streaming-diloco", "lowbit", "lowbit:late=1", "mp2"),
    "zeroone-adam:freeze_step=2",
]
WIDTH, STEPS = 1000, 5


def kept(algorithm: str) -> dict[str, float]:
    """The sizes of what is kept after some steps, in sizes of the model, by label."""
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(10)])
    model = DistributedDataParallel(module)
    optimizer: torch.optim.Optimizer = torch.optim.Adam(module.parameters())
    if algorithm.startswith("dgc"):  # brings its own momentum
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with tacit.attach(model, optimizer, strategy=algorithm) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
        size = sum(p.nbytes for p in module.parameters())
        return {label: found / size for label, found in session.footprint().items()}


def main() -> None:
    """Print a line for each algorithm."""
    with ranks() as me:
        for algorithm in sys.argv[1:] or ALGORITHMS:
            found = kept(algorithm)
            parts = ", ".join(f"{label} {share:.2f}" for label, share in found.items() if share > 0.005)
            if me == 0:
                print(f"{algorithm:28} {sum(found.values()):.2f}   {parts}", flush=True)


if __name__ == "__main__":
    main()
