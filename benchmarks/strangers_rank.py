"""What the workers of `strangers.py` run: a training that goes on until it is told to end.

tacit run --servers 1 --algorithm ALGORITHM -- benchmarks/strangers_rank.py FOLDER [STEPS]

It leaves in FOLDER what an attacker who knows everything would know (`door.json`), and a line a step of each
worker with the checksum of its parameters. Without STEPS it ends when FOLDER/end is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tacit
from tacit.environment import WORKER
from tacit.stores import encoding
from tacit.stores.client import server_connection, transport
from tacit.stores.messages import RunSpec

PAUSE = 0.01
"""Seconds between two steps of a training that is attacked."""
SECONDS = 20.0
"""That the process group waits for a peer."""


def main(folder: Path, steps: int | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    worker = int(os.environ.get(WORKER, dist.get_rank()))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    data = torch.Generator().manual_seed(worker)
    if worker == 0:
        watch_what_is_told(folder)
    with (
        tacit.attach(model, optimizer, tacit.from_env()) as session,
        (folder / f"steps{worker}").open("w", buffering=1) as log,
    ):
        pushes = 0
        for _ in numbers(folder, steps):
            x = torch.randn(8, 20, generator=data)
            loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            log.write(f"{checksum(network)} {float(loss.detach())}\n")
            pushes += 1
        facts = session.servers()
    (folder / f"end{worker}.json").write_text(
        json.dumps({"sum": checksum(network), "steps": pushes, "servers": facts})
    )
    dist.destroy_process_group()


def numbers(folder: Path, steps: int | None) -> Iterator[int]:
    """The steps: so many, or until the file is there, which all ranks of a world see in the same step."""
    if steps is not None:
        yield from range(steps)
        return
    over, number = torch.zeros(1), 0
    while not over:
        yield number
        number += 1
        time.sleep(PAUSE)
        over[0] = (folder / "end").exists()
        dist.broadcast(over, 0)


def watch_what_is_told(folder: Path) -> None:
    """Write down what this worker tells the first server of itself, and by what the two know each other."""

    class Watched(server_connection.ServerClient):
        def __init__(self, number: int, address: tuple[str, int], *rest: object) -> None:
            super().__init__(number, address, *rest)  # type: ignore[arg-type]
            run = next(each for each in rest if isinstance(each, RunSpec))
            door = {
                "address": address,
                "secret": os.environ["TACIT_SERVER_SECRET"],
                "run": encoding.write(run).decode(),
            }
            if number == 0:
                part = folder / "door.part"
                part.write_text(json.dumps(door))
                part.rename(folder / "door.json")

    transport.ServerClient = Watched  # type: ignore[assignment, attr-defined]


def checksum(network: nn.Module) -> int:
    """Of all parameters' bits."""
    flat = torch.cat([p.detach().reshape(-1) for p in network.parameters()])
    return zlib.crc32(flat.numpy().tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
