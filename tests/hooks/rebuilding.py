"""Rank 1 is killed as DDP's buckets become ours, or a checkpoint is put together; what the others say.

Or rank 0 is alone in asking for a checkpoint, or in `sync`, of the strategy that is given.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from checks import sgd, steps, wrapped

import tacit

moment = sys.argv[1]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
strategy: tacit.Strategy | str = tacit.Strategy(
    compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1)), topology=tacit.TwoPhase()
)
if moment == "sync":
    strategy = sys.argv[2]
model = wrapped()
optimizer = sgd(model)
session = tacit.attach(model, optimizer, strategy)
start = time.monotonic()
try:
    steps(model, optimizer, 3 if moment == "recut" else 5)
    if dist.get_rank() == 1 and moment not in ("alone", "sync"):
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if moment == "state_dict" or (moment == "alone" and dist.get_rank() == 0):
        session.state_dict()
    if moment == "sync" and dist.get_rank() == 0:
        session.sync()
    steps(model, optimizer, 5)
except Exception as error:
    seconds = time.monotonic() - start
    print(json.dumps({"kind": type(error).__name__, "says": str(error), "seconds": seconds}), flush=True)
    os._exit(1)
