"""A rank that counts what is passed in tacit: `python journey.py WHAT ...`; prints a JSON object for each.

WHAT is ALGORITHM, or ALGORITHM@SERVER. Every call of a function of tacit counts, in all threads of the rank:
one of a generator that is resumed, of a comprehension, and of a compiled kernel too. Of the last step, the
backward pass and the optimizer's step are counted apart: in the first a gradient is exchanged, in the second
parameters are.
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
    """What has been called, of the functions whose files are in `SRC`; `into` says where it is counted."""

    def __init__(self) -> None:
        self.into: str | None = None
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.crossings: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """For `sys.setprofile`."""
        if self.into is None or event != "call" or not frame.f_code.co_filename.startswith(SRC):
            return
        here, before = _file(frame), frame.f_back
        self.calls[self.into, here, frame.f_code.co_qualname] += 1
        if before is not None and before.f_code.co_filename.startswith(SRC):
            self.crossings[self.into] += _package(_file(before)) != _package(here)

    def said(self, part: str) -> dict[str, object]:
        """What was counted in the part."""
        calls = [[file, name, times] for (of, file, name), times in self.calls.most_common() if of == part]
        return {"calls": calls, "crossings": self.crossings[part]}


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename.removeprefix(SRC)


def _package(file: str) -> str:
    return file.split(os.sep)[0]


def main(algorithm: str, server: str) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 5)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    counts = Counts()
    threading.setprofile(counts)  # before there is a lane, whose thread has it then
    sys.setprofile(counts)
    with tacit.attach(model, optimizer, algorithm, servers=[server] if server else None) as session:
        for step in range(STEADY + 1):
            x = torch.randn(8, 40, generator=generator)
            y = torch.randint(0, 5, (8,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            counts.into = "backward" if step == STEADY else None
            loss.backward()
            counts.into = "step" if step == STEADY else None
            optimizer.step()
            counts.into = None
        buckets = len(session.session.buckets)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    parts = {part: counts.said(part) for part in ("backward", "step")}
    print(json.dumps({"algorithm": algorithm, "buckets": buckets, **parts}), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for what in sys.argv[1:]:
        main(*what.partition("@")[::2])
    dist.destroy_process_group()
