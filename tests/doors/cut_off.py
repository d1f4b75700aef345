"""Rank 1 takes its node's link down in step 5: it reaches neither its peers nor the launcher's store."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from checks import sgd, steps, wrapped

import tacit

algorithm, folder, moment = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank = dist.get_rank()
cut = 0.0


def cut_off() -> None:
    global cut
    if rank == 1:
        subprocess.run(["ip", "link", "set", os.environ["TACIT_INTERFACE"], "down"], check=True)
    cut = time.monotonic()


try:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, algorithm)
    steps(model, optimizer, 5)
    cut_off()
    if moment == "training":
        steps(model, optimizer, 5)
    session.close()
except Exception as error:
    said = {"kind": type(error).__name__, "says": str(error), "seconds": time.monotonic() - cut}
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump(said, file)
    os._exit(1)
