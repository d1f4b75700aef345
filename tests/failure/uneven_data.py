"""Ranks whose loops do not end together, and what each of them saw."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_training import flat, same_on_all_ranks, sgd, steps, wrapped
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from training_loop_checks import Loop, scaler

import tacit
from tacit.failure import barrier

torch.set_num_threads(1)
if sys.argv[1] == "all":
    barrier.SILENT_SECONDS = 4.0
dist.init_process_group("gloo", timeout=timedelta(seconds=80))
rank = dist.get_rank()


def said(name: str, scenario: Callable[[], object]) -> None:
    start, error = time.monotonic(), None
    try:
        scenario()
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    kind = type(error).__name__ if error is not None else "none"
    print(json.dumps({"name": name, "kind": kind, "says": str(error), "seconds": seconds}), flush=True)


def uneven(algorithm: str, short: int, by: int = 3, block: bool = True) -> None:
    """Rank `short` has `by` steps less than the others."""
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, algorithm)
    with session if block else nullcontext():
        steps(model, optimizer, 10 - by if rank == short else 10)
        for _ in range(20 if by < 0 else 0):  # the others train on, and take their time
            time.sleep(0.2)
            steps(model, optimizer, 1)
        if rank == 1 and not block:
            time.sleep(2)
    session.close()


def scaled() -> None:
    """The ranks would ask each other in the backward of step 8 whether a gradient has overflowed."""
    loop = Loop(scaler())
    with tacit.attach(loop.model, loop.optimizer, "localsgd:sync_every=8", scaler=loop.scaler):
        loop.steps(7 if rank == 2 else 10)


def slow() -> None:
    """Equal steps, at different times."""
    for algorithm in ("dense", "localsgd:sync_every=4", "ednncomm:sync_every=4", "ddp"):
        model = wrapped()
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm):
            steps(model, optimizer, 6)
            time.sleep(5.5 if rank == 1 and algorithm == "localsgd:sync_every=4" else 0.3 * rank)
        assert same_on_all_ranks(flat(model))


def joined(algorithm: str, before: bool) -> None:
    """torch's own way with uneven data."""
    model = wrapped()
    optimizer = sgd(model)
    with Join([model]) if before else nullcontext(), tacit.attach(model, optimizer, algorithm):
        with nullcontext() if before else Join([model]):
            steps(model, optimizer, 4 + rank)
        assert same_on_all_ranks(flat(model))
    Join([model], enable=False)
    with tacit.attach(model, optimizer, "dense"):
        steps(model, optimizer, 1)


def killed() -> None:
    model: DDP = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "dense", timeout=timedelta(seconds=4)):
        steps(model, optimizer, 5)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


if sys.argv[1] == "killed":
    said("killed", killed)
else:
    said("slow", slow)
    for early in ("dense", "localsgd:sync_every=8", "ednncomm:sync_every=8"):
        said(early, lambda early=early: uneven(early, short=2))
        dist.barrier()
    said("scaled", scaled)
    dist.barrier()
    said("without a block", lambda: uneven("localsgd:sync_every=100", short=3, by=1, block=False))
    dist.barrier()
    said("late", lambda: uneven("localsgd:sync_every=100", short=0, by=-1))
    dist.barrier()
    for each in ("dense", "localsgd:sync_every=2"):
        said(f"join around {each}", lambda each=each: joined(each, before=True))
        dist.barrier()
        said(f"join inside {each}", lambda each=each: joined(each, before=False))
        dist.barrier()
    said("join ddp", lambda: joined("ddp", before=False))
    said("ddp", lambda: uneven("ddp", short=2))  # the last, as it ends the default group
os._exit(0)  # collectives that were given up still hang in Gloo
