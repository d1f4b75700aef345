"""Trains without closing its session: `unclosed.py HOW ALGORITHM`, with steps of this rank's own."""

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from replicas import everywhere, flat, sgd, steps, wrapped

import tacit

how, algorithm = sys.argv[1:3]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank = dist.get_rank()
model = wrapped()
optimizer = sgd(model)
session = tacit.attach(model, optimizer, algorithm)
before = None
try:
    for step in range(12):
        if how == "raises" and rank == 1 and step == 6:
            raise ValueError("of the script's own")
        if how == "ends early" and rank == 1 and step == 6:
            break
        steps(model, optimizer, 1, seed=step)
    if how == "is killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "saves" and rank == 0:
        model.state_dict()
        model.module.state_dict()
    if how in ("is destroyed", "exits"):
        before = torch.stack(everywhere(flat(model))).mean(0)
    if how == "says exit":
        sys.exit(0)
finally:
    if how != "exits":
        dist.destroy_process_group()
mean = None if before is None else float((flat(model) - before).abs().max())
print(json.dumps({"sum": float(flat(model).double().sum()), "off": mean, **session.metrics()}), flush=True)
