"""Rank 1 takes its node's link down in step 5: it reaches neither its peers nor the launcher's store.

`rank_cut_off.py ALGORITHM FOLDER MOMENT HOW`: where the error is "caught", each rank says so and is gone;
where it is "uncaught", a process that rank 1 has started says when rank 1 has ended.
"""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gloo_checks import sgd, steps, wrapped

import tacit

WATCH = """
import json, os, pathlib, select, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
_, process, began, file = sys.argv
select.select([os.pidfd_open(int(process))], [], [])
seconds = time.monotonic() - float(pathlib.Path(began).read_text())
pathlib.Path(file).write_text(json.dumps({"seconds": seconds}))
"""

algorithm, folder, moment, how = sys.argv[1:]
torch.set_num_threads(1)
launcher, own, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=60)))
launcher.set(f"begun/{own}", "")  # under load one may begin more than 8 s before the other
launcher.wait([f"begun/{each}" for each in range(size)], timedelta(seconds=60))
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
rank = dist.get_rank()
file, began = Path(folder, f"rank{rank}.json"), Path(folder, "began")
if how == "uncaught" and rank == 1:
    command = [sys.executable, "-I", "-S", "-c", WATCH, str(os.getpid()), str(began), str(file)]
    subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
cut = 0.0


def cut_off() -> None:
    global cut
    if rank == 1:
        subprocess.run(["ip", "link", "set", os.environ["TACIT_INTERFACE"], "down"], check=True)
        began.write_text(str(time.monotonic()))
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
    if how == "uncaught":
        if rank == 0:  # or all others would be ended with it
            time.sleep(30)
        raise
    said = {"kind": type(error).__name__, "says": str(error), "seconds": time.monotonic() - cut}
    file.write_text(json.dumps(said))
    os._exit(1)
