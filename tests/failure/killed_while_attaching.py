"""Rank 1 is killed while the ranks attach, as it enters the function that is named; what the others say."""

import json
import os
import pkgutil
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gloo_checks import sgd, wrapped

import tacit

algorithm, where = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
model = wrapped()
optimizer = sgd(model)
if dist.get_rank() == 1:
    module, _, name = where.rpartition(".")
    setattr(pkgutil.resolve_name(module), name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
start = time.monotonic()
try:
    tacit.attach(model, optimizer, algorithm, probe=True)
except Exception as error:
    seconds = time.monotonic() - start
    print(json.dumps({"kind": type(error).__name__, "says": str(error), "seconds": seconds}), flush=True)
    os._exit(1)
