"""A member that has shards: `sharded_member.py NAME STORE ALGORITHM STEPS SHARDS`.

By torchrun it is a rank of a replica that FSDP2 shards, and by itself one that takes part beside such.
"""

import json
import logging
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.api.members import MemberSession
from tacit.model.trained_model import local

PACE = 0.02


def say(**what: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), **what})
    os.write(1, f"{line}\n".encode())  # at once, as the ranks share the pipe


def rows(x: Tensor, shards: int, rank: int) -> Tensor:
    """What FSDP2 gives this rank."""
    parts = x.chunk(shards)
    return parts[rank] if rank < len(parts) else x[:0]


def main() -> None:
    name, store, algorithm, steps, count = sys.argv[1:6]
    shards = int(count)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    whole = "WORLD_SIZE" not in os.environ
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if whole else {}
    dist.init_process_group("gloo", **alone)
    torch.manual_seed(sum(map(ord, name)) + os.getpid())  # so what is equal was taken from others
    network: Any = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
    if whole:
        network = DistributedDataParallel(network)
    else:
        for layer in (network[0], network[2], network):
            fully_shard(layer)
    data = torch.Generator().manual_seed(len(name) + dist.get_rank())
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    x = torch.randn(32, 16, generator=data)
    untrained = float(nn.functional.cross_entropy(network(x), (x @ teacher).argmax(1)).detach())
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    members = tacit.Members(name=name, store=store, silence=1.5, patience=30.0, shards=shards)
    session = tacit.attach(network, optimizer, algorithm, members=members)
    assert isinstance(session, MemberSession)
    say(begun=session.step, period=session.members.number, members=session.members.names)
    while session.step < int(steps):
        x = torch.randn(32, 16, generator=data)
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(network(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        say(step=session.step, period=session.members.number, members=session.members.names)
        time.sleep(PACE)
    session.close()
    tensors = (*network.parameters(), *(each["exp_avg"] for each in optimizer.state.values()))
    losses = {"first": untrained, "last": float(loss.detach())}
    for rank in range(shards) if whole else [dist.get_rank()]:
        mine = [rows(x, shards, rank) if whole else local(x) for x in tensors]
        sums = [float(x.detach().double().sum()) for x in mine]
        say(**{"end": session.metrics(), "sums": sums, **losses, "rank": rank})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
