"""What the ranks of a trial run: a short training, in which one of them fails as it was told.

tacit run --algorithm ALGORITHM -- benchmarks/fault_rank.py ABOUT

ABOUT is JSON, as `fault_trials.Trial.about` makes it. Every rank leaves in the folder of the trial when its
fault came, and the checksum of its parameters at the end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pyroute2 import IPRoute
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tacit

STEPS, EPOCHS = 16, 4
PAUSE = 0.03
"""Seconds that a step takes at least, so that faults from outside meet a training."""


def main(about: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = Path(about["folder"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=about["timeout"]))
    rank = int(os.environ.get("TACIT_WORKER", dist.get_rank()))
    sums = {}
    for algorithm in about["algorithms"]:
        sums[algorithm] = trained(algorithm, rank, about, folder)
    (folder / f"sums{rank}.json").write_text(json.dumps(sums))
    dist.destroy_process_group()


def trained(algorithm: str, rank: int, about: dict[str, Any], folder: Path) -> int:
    """The checksum of the parameters after a training with this algorithm."""
    torch.manual_seed(about["seed"])
    network = small()
    model = DistributedDataParallel(network, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1000 * about["seed"] + rank)
    known = {"steps_per_epoch": STEPS // EPOCHS, "epochs": EPOCHS, "seed": about["seed"]}
    with tacit.attach(model, optimizer, algorithm, **known) as session:
        for step in range(STEPS):
            if step == about["step"] and rank in about["ranks"] and fails(about["kind"], network, folder):
                break
            x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            session.observe(loss)
            optimizer.step()
            time.sleep(PAUSE)
    return checksum(network)


def small() -> nn.Module:
    """A network with running statistics, in several buckets."""
    first = nn.Linear(20, 60), nn.BatchNorm1d(60), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(60, 40), nn.Linear(40, 5))


def checksum(network: nn.Module) -> int:
    """Of all parameters' bits."""
    flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return zlib.crc32(flat.numpy().tobytes())


def fails(kind: str, network: nn.Module, folder: Path) -> bool:
    """Do what the trial asks of this rank; whether it is to end its training here."""
    (folder / "fault").write_text(str(time.time()))
    pid = os.getpid()
    match kind:
        case "kill":
            os.kill(pid, signal.SIGKILL)
        case "freeze":
            os.kill(pid, signal.SIGSTOP)
        case "freeze 3 s":
            subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {pid}"])
            os.kill(pid, signal.SIGSTOP)
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("a fault of the script's own")
        case "segfault":
            ctypes.string_at(0)
        case "nan":
            poison(network)
        case "slow":
            time.sleep(4)
        case "link down" | "link 2 s":
            cut(2.0 if kind == "link 2 s" else None)
        case "early end":
            return True
        case _:  # from outside: the file above says when
            time.sleep(1)
    return False


def poison(network: nn.Module) -> None:
    """Let one entry of the next gradient be NaN."""

    def infect(g: Tensor) -> Tensor:
        handle.remove()
        g = g.clone()
        g.view(-1)[0] = torch.nan
        return g

    handle = next(network.parameters()).register_hook(infect)  # type: ignore[no-untyped-call]


def cut(seconds: float | None) -> None:
    """Take this node's link down: for so long, or for good."""
    link_is("down")
    if seconds is not None:
        timer = threading.Timer(seconds, link_is, ["up"])
        timer.daemon = True
        timer.start()


def link_is(state: str) -> None:
    """Set this node's link up or down."""
    with IPRoute() as route:
        (index,) = route.link_lookup(ifname=os.environ["TACIT_INTERFACE"])
        route.link("set", index=index, state=state)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
