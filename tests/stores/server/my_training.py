"""A worker whose compressor is its own: `python my_training.py HOW`; prints JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from my_codecs import FirstRows, OneScale
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.merges import ServerParams
from tacit.topologies import Asynchronous

how = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(20, 5, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.module.weight.detach().clone()
strategy = (
    tacit.Strategy(compressor=tacit.ErrorFeedback(FirstRows()), topology=tacit.Star())
    if how == "averages"
    else tacit.Strategy(
        subject="delta",
        compressor=tacit.ErrorFeedback(OneScale()),
        topology=tacit.Star(Asynchronous(), pull=OneScale(levels=50)),
        merge=ServerParams(whole=False),
    )
)
try:
    with tacit.attach(model, optimizer, strategy) as session:
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            nn.functional.mse_loss(model(x), x[:, :5]).backward()
            optimizer.step()
        pushed = session.metrics()["push_bytes"]
except Exception as error:
    print(json.dumps({"kind": type(error).__name__, "says": str(error)}), flush=True)
    os._exit(1)
after = model.module.weight.detach()
moved = float((after - before).norm())
print(json.dumps({"pushed": pushed, "moved": moved, "sum": float(after.double().sum())}), flush=True)
os._exit(0)
