"""Ray Train: as many workers as RANKS says, on the machines that Ray knows (`pip install "ray[train]"`).

RANKS=2 python examples/launch/ray_train.py
"""

import os

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import tacit


def train() -> None:
    """What each worker runs; Ray has made the process group."""
    torch.manual_seed(0)
    model = prepare_model(nn.Linear(100, 1))  # DDP
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mine = torch.Generator().manual_seed(dist.get_rank())
    with tacit.attach(model, optimizer, tacit.from_env()) as session:
        for _ in range(200):
            x = torch.randn(32, 100, generator=mine)
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(session.active_path)
        print(f"loss {loss.item():.4f} after {session.metrics()['steps']} steps")


if __name__ == "__main__":
    environment = {
        "TACIT_ALGORITHM": os.environ.get("TACIT_ALGORITHM", "diloco:sync_every=20"),
        "OMP_NUM_THREADS": "1",
    }
    scaling = ScalingConfig(num_workers=int(os.environ.get("RANKS", "2")), use_gpu=torch.cuda.is_available())
    import ray

    ray.init(runtime_env={"env_vars": environment})
    TorchTrainer(train, scaling_config=scaling).fit()
