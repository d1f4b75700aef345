"""Trains without closing its session: `unclosed_session.py HOW ALGORITHM`, with steps of this rank's own."""

import copy
import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_training import everywhere, flat, sgd, steps, wrapped

import tacit
from tacit.failure import detector

how, algorithm = sys.argv[1:3]
if how == "is resumed":
    detector.POLL_SECONDS, detector.COMPARED = 0.1, 1
torch.set_num_threads(1)
# One rank that exits has imported everything itself, while the others waited for it.
dist.init_process_group("gloo", timeout=timedelta(seconds=60 if how == "exits" else 10))
rank = dist.get_rank()
model = wrapped()
optimizer = sgd(model)
session = tacit.attach(model, optimizer, algorithm)
before = None


def repeated() -> None:
    """Three steps behind a round, and once more from there, at another learning rate."""
    steps(model, optimizer, 4)
    time.sleep(0.5)  # so that ranks have compared rates
    saved = copy.deepcopy((session.state_dict(), model.state_dict(), optimizer.state_dict()))
    for lr in (0.05, 0.01):
        for kept, each in zip(saved, (session, model, optimizer), strict=True):
            each.load_state_dict(kept)
        optimizer.param_groups[0]["lr"] = lr
        steps(model, optimizer, 3)
        time.sleep(0.5)


try:
    if how == "is resumed":
        repeated()
    for step in range(12 if how != "is resumed" else 0):
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
    if how == "saves" and algorithm == "localsgd:sync_every=8":
        session.close()
        session = tacit.attach(model, optimizer, "lowbit")  # no round of which makes replicas equal
        steps(model, optimizer, 1)
        if rank == 0:
            model.state_dict()
    if how in ("is destroyed", "exits"):
        before = torch.stack(everywhere(flat(model))).mean(0)
    if how == "says exit":
        sys.exit(0)
finally:
    if how != "exits":
        dist.destroy_process_group()
mean = None if before is None else float((flat(model) - before).abs().max())
print(json.dumps({"sum": float(flat(model).double().sum()), "off": mean, **session.metrics()}), flush=True)
