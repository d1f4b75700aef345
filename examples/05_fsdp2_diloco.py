"""DiLoCo on sharded models: FSDP2 inside each machine, and every few steps a short message between machines.

Each machine has one replica, and its ranks share it out: `fully_shard` gets the mesh's near axis. tacit
averages the shards along the far axis. A small transformer learns to go on with the digits of fractions. Run
it on this machine:

    torchrun --nproc-per-node 2 examples/05_fsdp2_diloco.py

or on two emulated machines of two ranks:

    tacit run --cluster 2x2@100mbit --algorithm diloco -- examples/05_fsdp2_diloco.py
"""

import math
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import tacit

STEPS = 80
WIDTH = 64
os.environ.setdefault("TACIT_ALGORITHM", "diloco:sync_every=20,bits=4")  # under plain torchrun


class Model(nn.Module):
    """A transformer of two layers over the ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digit behind each of `x`, of shape (batch, length): (batch x length, 10)."""
        length = x.shape[1]
        hidden = self.digits(x) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden.flatten(0, 1))
        return logits


def fractions(count: int, generator: torch.Generator) -> Tensor:
    """The first 16 digits of a / b behind the point, for b below 30; of shape (count, 16)."""
    below = torch.randint(2, 30, (count,), generator=generator)
    rest = torch.randint(1, 1 << 20, (count,), generator=generator) % below
    digits = []
    for _ in range(16):
        rest = 10 * rest
        digits.append(rest // below)
        rest = rest % below
    return torch.stack(digits, 1)


def main() -> None:
    """Train, and say how well it goes on and what was sent."""
    dist.init_process_group("gloo")
    ours = [0] * dist.get_world_size()
    dist.all_gather_object(ours, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    near = math.gcd(*ours)  # the ranks of a machine; what divides them, where machines differ
    far = dist.get_world_size() // near
    if far == 1:  # one machine: every rank is a replica
        near, far = 1, near
    mesh = init_device_mesh("cpu", (far, near), mesh_dim_names=("far", "near"))
    torch.manual_seed(0)  # replicas begin alike
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["near"])
    fully_shard(model, mesh=mesh["near"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    mine = torch.Generator().manual_seed(1 + dist.get_rank())  # every rank has data of its own
    with tacit.attach(model, optimizer, tacit.from_env(), mesh=mesh) as session:
        for _ in range(STEPS):
            digits = fractions(64, mine)
            optimizer.zero_grad()
            cross_entropy(model(digits[:, :-1]), digits[:, 1:].flatten()).backward()
            optimizer.step()

    digits = fractions(500, torch.Generator().manual_seed(0))
    with torch.no_grad():  # every rank takes part, as each has a shard
        right = model(digits[:, :-1]).argmax(1).view(500, -1) == digits[:, 1:]
    if dist.get_rank() == 0:
        told, accuracy = session.metrics(), right[:, 8:].float().mean()
        print(session.active_path)
        print(f"{far} replicas, each on {near} ranks: accuracy {accuracy:.3f} after {told['steps']} steps")
        print(f"a rank sent {told['bytes_out'] / 1e6:.2f} MB to other machines, in {told['rounds']} rounds")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
