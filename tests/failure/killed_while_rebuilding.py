"""Rank 1 is killed as DDP's buckets become ours, or a checkpoint is put together; what the others say.

Or rank 0 is alone in asking for a checkpoint, in `sync`, or in loading, of the strategy that is given.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from gloo_checks import sgd, steps, wrapped

import tacit

moment = sys.argv[1]
torch.set_num_threads(1)
alone = moment in ("alone", "sync", "load")  # which is found long before the time-out
dist.init_process_group("gloo", timeout=timedelta(seconds=100 if alone else 6))
strategy: tacit.Strategy | str = tacit.Strategy(
    compressor=tacit.ErrorFeedback(tacit.TopK(ratio=0.1)), topology=tacit.TwoPhase()
)
if moment in ("sync", "load"):
    strategy = sys.argv[2]
model = wrapped()
optimizer = sgd(model)
session = tacit.attach(model, optimizer, strategy)
start = time.monotonic()


def refused(state: dict[str, object]) -> str:
    try:
        session.load_state_dict(state)
    except tacit.CheckpointError as error:
        return str(error)
    return ""


def load_together() -> dict[str, object]:
    """States that fit on one rank alone, or are of two moments, change nothing; behind five steps."""
    earlier, first = session.state_dict(), dist.get_rank() == 0
    steps(model, optimizer, 1)
    later = session.state_dict()
    assert ("'odd'" if first else "another rank") in refused(later | {"odd": 1} if first else later)
    assert f"of step {4 if first else 5}, and not all" in refused(earlier if first else later)
    assert session.levels[-1].session.step == 5
    assert refused(later) == ""
    return later


try:
    steps(model, optimizer, {"recut": 3, "load": 4}.get(moment, 5))
    loaded = load_together() if moment == "load" else {}
    if dist.get_rank() == 1 and not alone:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if moment == "state_dict" or (moment == "alone" and dist.get_rank() == 0):
        session.state_dict()
    if moment == "sync" and dist.get_rank() == 0:
        session.sync()
    if loaded and dist.get_rank() == 0:
        session.load_state_dict(loaded)
    steps(model, optimizer, 5)
except Exception as error:
    seconds = time.monotonic() - start
    print(json.dumps({"kind": type(error).__name__, "says": str(error), "seconds": seconds}), flush=True)
    os._exit(1)
