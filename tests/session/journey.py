"""A rank that counts what one step passes in tacit: `python journey.py ALGORITHM [SERVER]`; prints JSON.

Every call of a function of tacit counts, in all threads of the rank; a generator that is resumed counts too,
and a comprehension that has a frame of its own.
"""

import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit

SRC = f"{Path(tacit.__file__).parent}{os.sep}"
STEADY = 8
"""Steps before the one that is counted: by then DDP's buckets have settled, and all is allocated."""


class Counts:
    """What has been called, of the functions whose files are in `SRC`.

    Attributes:
        calls: by (file, function); crossings: by (file, function) of the caller and of what it has called, in
            another of the folders and files in `SRC`.
    """

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.crossings: Counter[tuple[str, str, str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`."""
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(SRC):
            return
        here, before = _place(frame), frame.f_back
        self.calls[here] += 1
        if before is not None and before.f_code.co_filename.startswith(SRC):
            there = _place(before)
            if _package(there) != _package(here):
                self.crossings[(*there, *here)] += 1


def _place(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename.removeprefix(SRC), frame.f_code.co_qualname


def _package(place: tuple[str, str]) -> str:
    return place[0].split(os.sep)[0]


def main(algorithm: str, servers: list[str]) -> None:
    torch.set_num_threads(1)
    counts = Counts()
    threading.setprofile(counts)  # before any lane has a thread
    sys.setprofile(counts)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with tacit.attach(model, optimizer, algorithm, servers=servers or None) as session:
        for step in range(STEADY + 1):
            x = torch.randn(8, 40, generator=generator)
            y = torch.randint(0, 5, (8,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            counts.on = step == STEADY and not os.environ.get("NOB")
            loss.backward()
            counts.on = step == STEADY and not os.environ.get("NOS")
            optimizer.step()
            counts.on = False
        buckets = len(session.session.buckets)
    sys.setprofile(None)
    dist.destroy_process_group()
    said = {
        "buckets": buckets,
        "calls": [[*place, count] for place, count in counts.calls.most_common()],
        "crossings": [[*edge, count] for edge, count in counts.crossings.most_common()],
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
