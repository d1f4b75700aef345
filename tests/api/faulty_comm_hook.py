"""As `faulty_rank.py`, with the bare hook: rank 1 goes wrong in step 5; the others say what they saw."""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_training import sgd, steps, wrapped

import tacit

(fault,) = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
start = time.monotonic()
try:
    model = wrapped()
    optimizer = sgd(model)
    with tacit.CommState(model, "topk") as state:
        model.register_comm_hook(state, tacit.comm_hook)
        steps(model, optimizer, 5)
        start = time.monotonic()
        if dist.get_rank() == 1 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1:
            raise ValueError("a bad batch")
        steps(model, optimizer, 5)
except Exception as error:
    seconds = time.monotonic() - start
    print(json.dumps({"kind": type(error).__name__, "says": str(error), "seconds": seconds}), flush=True)
    os._exit(1)
