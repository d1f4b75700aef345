"""A script for `tacit compare`, in which an argument names what is wrong with it."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tacit

how, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
seed, rate, asked_steps = (0, 1.0, None) if how == "never asks" else tacit.trial()
steps = asked_steps or steps
if how == "unseeded":
    torch.seed()
else:
    torch.manual_seed(7 if how == "ignores" else seed)
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * rate)
strategy = tacit.from_env()
if how == "breaks":
    raise ValueError("broken by its author")
data = torch.Generator().manual_seed(100 * (0 if how == "ignores" else seed) + rank)
if how == "short" and strategy.name == "topk":
    steps //= 2
if how == "never closes":
    tacit.attach(model, optimizer, strategy)
    tacit.report(steps, loss=1.0)
    dist.barrier()  # the other may still be attaching
    os._exit(0)
with tacit.attach(model, optimizer, strategy):
    for step in range(1, steps + 1):
        x = torch.randn(16, 32, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 and how != "never reports":
            more = {"accuracy": 0.5} if how == "other names" and strategy.name == "topk" else {}
            tacit.report(step, loss=loss, **more)
dist.destroy_process_group()
