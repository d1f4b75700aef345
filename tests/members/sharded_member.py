"""A rank of a replica that FSDP2 shards: `sharded_member.py NAME STORE ALGORITHM STEPS`, by torchrun."""

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

import tacit
from tacit.api.members import MemberSession
from tacit.model.trained_model import local

PACE = 0.02


def say(**what: Any) -> None:
    line = json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), **what})
    os.write(1, f"{line}\n".encode())  # at once, as the ranks share the pipe


def main() -> None:
    name, store, algorithm, steps = sys.argv[1:5]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    dist.init_process_group("gloo")
    torch.manual_seed(sum(map(ord, name)) + os.getpid())  # so what is equal was taken from others
    network: Any = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 4))
    for layer in (network[0], network[2], network):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    members = tacit.Members(name=name, store=store, silence=1.5, patience=30.0)
    session = tacit.attach(network, optimizer, algorithm, members=members)
    assert isinstance(session, MemberSession)
    say(begun=session.step, period=session.members.number, members=session.members.names)
    data = torch.Generator().manual_seed(len(name) + dist.get_rank())
    teacher = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    first = None
    while session.step < int(steps):
        x = torch.randn(32, 16, generator=data)
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(network(x), (x @ teacher).argmax(1))
        loss.backward()
        optimizer.step()
        first = first or float(loss.detach())
        say(step=session.step, period=session.members.number, members=session.members.names)
        time.sleep(PACE)
    session.close()
    moments = [local(each["exp_avg"]) for each in optimizer.state.values()]
    sums = [float(x.double().sum()) for x in (*map(local, network.parameters()), *moments)]
    say(end=session.metrics(), sums=sums, first=first, last=float(loss.detach()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
