"""What the ranks of a trial run: a short training, in which one of them fails as it was told.

tacit run --algorithm ALGORITHM -- benchmarks/fault_rank.py ABOUT

ABOUT is JSON, as `fault_trials.Trial.about` and `fault_scenes.Stage.about` make it. Every rank leaves in the
folder of the trial when its fault came, and the checksum of its parameters at the end.
"""

from __future__ import annotations

import copy
import ctypes
import json
import multiprocessing
import os
import pkgutil
import resource
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.planning.decider import Choice, ChoosingSession

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
    known: dict[str, Any] = {"steps_per_epoch": STEPS // EPOCHS, "epochs": EPOCHS, "seed": about["seed"]}
    model = network
    if about.get("sharded"):
        mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("far", "near"))
        fully_shard(network, mesh=mesh["near"])
        known["mesh"] = mesh
    else:
        model = DistributedDataParallel(network, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    if algorithm == "auto":
        known["decider"] = Chosen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(1000 * about["seed"] + rank)
    if "where" in about and rank in about["ranks"]:
        dies_in(about["where"], folder)
    with tacit.attach(model, optimizer, algorithm, **known) as session:
        for step in range(STEPS + 1):
            comes = step == about["step"] and rank in about["ranks"]
            if comes and fails(about["kind"], network, folder, session):
                break
            if step == STEPS:  # a fault here is one around closing
                break
            x, y = torch.randn(8, 20, generator=data), torch.randint(0, 5, (8,), generator=data)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            session.observe(loss)
            optimizer.step()
            time.sleep(PAUSE)
    return checksum(network)


class Chosen:
    """What `auto` takes after three steps, whatever it measures."""

    steps = 3

    def begin(self, session: ChoosingSession) -> None:
        """Nothing is to be prepared."""

    def measure(self, session: ChoosingSession) -> None:
        """Nothing is measured."""

    def decide(self) -> Choice:
        """Always the same."""
        return Choice("int8", "it is always this", 1.0, (("int8", 1.0),))


def small() -> nn.Module:
    """A network with running statistics, in several buckets."""
    first = nn.Linear(20, 60), nn.BatchNorm1d(60), nn.ReLU()
    return nn.Sequential(*first, nn.Linear(60, 40), nn.Linear(40, 5))


def checksum(network: nn.Module) -> int:
    """Of all parameters' bits."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in network.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in shards])
    return zlib.crc32(flat.numpy().tobytes())


def dies_in(function: str, folder: Path) -> None:
    """Be killed as this function is entered."""
    module, _, name = function.rpartition(".")
    setattr(pkgutil.resolve_name(module), name, lambda *_: fails("kill", nn.Module(), folder, None))


def fails(kind: str, network: nn.Module, folder: Path, session: Any) -> bool:
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
        case "nan" | "nonsense":
            poison(network, torch.nan if kind == "nan" else 1e30)
        case "kill torchrun":
            os.kill(os.getppid(), signal.SIGKILL)
        case "kill node":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
        case "kill server by hand":
            os.kill(int((folder / "server.pid").read_text()), signal.SIGKILL)
        case "fork":
            # As a DataLoader's. One that ends as an interpreter hangs in torch's threads, with DDP alone too.
            child = multiprocessing.get_context("fork").Process(target=print)
            child.start()
            child.join()
            if child.exitcode:
                raise RuntimeError(f"a forked child ended with {child.exitcode}")
        case "cgroup":
            (Path(os.environ["FAULT_CGROUP"]) / "cgroup.procs").write_text(str(pid))
            bytearray(os.urandom(1)) * 2**28
        case "address space":
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + 2**26, now + 2**26))
            torch.ones(2**28)
        case "damaged states":
            refuses(session)
        case "slow":
            time.sleep(4)
        case "link down" | "link 2 s":
            cut(2.0 if kind == "link 2 s" else None)
        case "early end":
            return True
        case _:  # from outside: the file above says when
            time.sleep(1)
    return False


def refuses(session: Any) -> None:
    """Load states that cannot be, each of which is to be refused, and change nothing.

    Raises:
        RuntimeError: one is not refused, or not by name.
    """
    damages = {"steps": -5, "rounds": ["7"], "buckets": None, "ranks": 10**30}
    for name, value in damages.items():
        state = {**copy.deepcopy(session.state_dict()), name: value}
        try:
            session.load_state_dict(state)
        except tacit.CheckpointError:
            continue
        except Exception as error:
            raise RuntimeError(f"a state with {name}={value}: {error!r}") from error
        raise RuntimeError(f"a state with {name}={value} is accepted")


def poison(network: nn.Module, value: float) -> None:
    """Let one entry of the next gradient be this."""

    def infect(g: Tensor) -> Tensor:
        handle.remove()
        g = g.clone()
        g.view(-1)[0] = value
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
