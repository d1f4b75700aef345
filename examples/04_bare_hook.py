"""The bare hook: tacit where a script already registers one of torch's communication hooks, and nothing else.

In place of torch's `bf16_compress_hook` or `powerSGD_hook`: a `state` and a `hook`, marked 1 and 2. It learns
to tell three spirals apart. Run it on this machine:

    torchrun --nproc-per-node 2 examples/04_bare_hook.py

or on two emulated machines, with any algorithm that exchanges gradients:

    tacit run --cluster 2x1@100mbit --algorithm powersgd:rank=2 -- examples/04_bare_hook.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import tacit

STEPS = 200
os.environ.setdefault("TACIT_ALGORITHM", "topk:ratio=0.01")  # under plain torchrun


def spirals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of the plane, of shape (count, 2), and which of three spirals each lies on."""
    arm = torch.randint(3, (count,), generator=generator)
    radius = torch.rand(count, generator=generator)
    angle = 5 * radius + arm * 2 * torch.pi / 3 + 0.1 * torch.randn(count, generator=generator)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), arm


def main() -> None:
    """Train, and say how well it went and what was sent."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    state = tacit.CommState(model, tacit.from_env())  # <- 1
    model.register_comm_hook(state, tacit.comm_hook)  # <- 2
    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    for _ in range(STEPS):
        x, arm = spirals(128, mine)
        optimizer.zero_grad()
        cross_entropy(model(x), arm).backward()
        optimizer.step()
    state.close()

    x, arm = spirals(1000, torch.Generator().manual_seed(0))
    with torch.inference_mode():
        accuracy = (network(x).argmax(1) == arm).float().mean().item()
    if dist.get_rank() == 0:
        told = state.metrics()
        print(state.active_path)
        print(f"accuracy {accuracy:.3f} after {told['steps']} steps")
        print(f"{told['compression']:.1f} times less sent than without compression")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
