"""Restarts: machines die, leave and come, and the training goes on with as many ranks as there are.

All ranks save every ten steps. torchrun starts them again when one is gone or a machine comes, and they go on
from the last whole checkpoint, so at most ten steps are lost. The step decides the batch, and the ranks share
it, so that their number changes nothing in what is trained. It fits a random teacher network. On this machine
ranks may be killed:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 10 examples/13_elastic.py

On one to four machines with a common disk, each of which may come and go, but for the first:

    torchrun --nnodes 1:4 --nproc-per-node 2 --max-restarts 10 --rdzv-backend c10d --rdzv-id 1 \\
        --rdzv-endpoint node0:29500 --rdzv-conf last_call_timeout=5,keep_alive_interval=2 \\
        examples/13_elastic.py

Without restarts, and on emulated machines:

    torchrun --nproc-per-node 2 examples/13_elastic.py
    tacit run --cluster 2x1@100mbit --algorithm topk:ratio=0.02 -- examples/13_elastic.py

Another number of steps, and another folder than `checkpoints`, may follow.
"""

import os
import shutil
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tacit

EVERY, BATCH = 10, 48  # steps; samples of all ranks together
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
folder = Path(sys.argv[2] if len(sys.argv) > 2 else "checkpoints")
os.environ.setdefault("TACIT_ALGORITHM", "topk:ratio=0.01")  # under plain torchrun

local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
device = torch.device("cuda", local) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
teacher = nn.Linear(64, 10).to(device)
network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
model = DistributedDataParallel(network, device_ids=[local] if gpus else None, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def save(session: tacit.Attached, step: int) -> None:
    """Write a file for each rank; when all are there, `latest` names their folder."""
    name = f"{step}-{ranks}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state | {"tacit": session.state_dict()}, folder / name / f"{rank}.pt")
    dist.barrier()
    if rank == 0:
        (folder / "new").write_text(name)
        os.replace(folder / "new", folder / "latest")
        for old in {*folder.glob("*-*")} - {folder / name}:
            shutil.rmtree(old)


def load(session: tacit.Attached) -> int:
    """Load the last whole checkpoint, if there is one; returns its step."""
    if not (folder / "latest").exists():
        return 0
    name = (folder / "latest").read_text()
    step, saved_by = map(int, name.split("-"))
    files = [folder / name / f"{each}.pt" for each in range(saved_by)]
    states = [torch.load(file, map_location="cpu") for file in files]
    own = states[rank % saved_by]
    network.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])
    session.load_state_dict(tacit.join_states(each["tacit"] for each in states))
    return step


with tacit.attach(model, optimizer, tacit.from_env(), timeout=timedelta(minutes=2)) as session:
    first = load(session)
    for step in range(first, steps):
        torch.manual_seed(step)
        x = torch.randn(BATCH, 64)[rank::ranks].to(device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), teacher(x).argmax(1)).backward()
        optimizer.step()
        if step == first and rank == 0:
            print(f"from step {step} on {ranks} ranks", flush=True)
        if (step + 1) % EVERY == 0:
            save(session, step + 1)
    print(f"{session.active_path}, after {steps} steps")
dist.destroy_process_group()
