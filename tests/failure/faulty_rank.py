"""A rank goes wrong in step 5, in the way that the first argument names; the others say what they saw."""

import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from gloo_checks import network, sgd, steps, wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tacit

SHARDED = "FSDP2, "
fault, algorithm = sys.argv[1:3]
known = {"steps_per_epoch": 1000, "epochs": 1}
victim = int(sys.argv[3]) if len(sys.argv) > 3 else 1
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=6))
rank = dist.get_rank()


def go_wrong() -> None:
    if fault == "overflows":
        for p in model.parameters():
            p.register_hook(lambda g: torch.full_like(g, 3e38))
        return
    if fault == "nan":
        next(model.parameters()).register_hook(lambda grad: grad * torch.nan)
        return
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "interrupted":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
        os.kill(os.getpid(), signal.SIGINT)
    if fault == "raises":
        raise ValueError("a bad batch")
    time.sleep(9 if fault == "slow" else 60)


start = time.monotonic()
try:
    # A rank that leaves could end the broadcast of a buffer that others are at, in their next forward.
    if algorithm.startswith(SHARDED):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near"))
        model, known["mesh"] = fully_shard(network(), mesh=mesh["near"]), mesh
    else:
        model = wrapped(nn.Sequential(network(), nn.BatchNorm1d(5)) if fault == "nan" else None)
    if rank == 2 and fault == "nan":
        model.register_forward_hook(lambda *_: time.sleep(1))
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, algorithm.removeprefix(SHARDED), **known)
    with nullcontext() if fault == "nan" else session:
        steps(model, optimizer, 5)
        if fault == "overflows":  # in what is owed, and nowhere else: the parameters stay
            optimizer.param_groups[0]["lr"] = 0.0
        start = time.monotonic()
        if rank == victim:
            go_wrong()
        steps(model, optimizer, 5)
except Exception as error:
    now = time.monotonic()
    said = {"kind": type(error).__name__, "says": str(error), "seconds": now - start, "at": now}
    print(json.dumps(said), flush=True)
    os._exit(1)
