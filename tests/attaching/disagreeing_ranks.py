"""Ranks that do not mean the same, at attach or later, and what each of them was told."""

import json
import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from rank_training import flat, same_on_all_ranks, sgd, steps, wrapped

import tacit
from tacit.failure import detector

torch.set_num_threads(1)
detector.POLL_SECONDS, detector.COMPARED = 0.1, 2
dist.init_process_group("gloo", timeout=timedelta(seconds=40))
rank = dist.get_rank()


def said(name: str, scenario: Callable[[], object]) -> None:
    start, error = time.monotonic(), None
    try:
        scenario()
    except Exception as raised:
        error = raised
    told = {"name": name, "kind": type(error).__name__, "says": str(error), "by": time.monotonic() - start}
    print(json.dumps(told), flush=True)


def attached(mine: str, others: str, lr: float = 0.05, **given: object) -> None:
    """Rank 1 has another one."""
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr if rank == 1 else 0.05, momentum=0.9)
    with tacit.attach(model, optimizer, mine if rank == 1 else others, **given):  # type: ignore[arg-type]
        steps(model, optimizer, 3)


def changed(algorithm: str, after: int, back: bool = False) -> None:
    """Rank 1 changes its rate, and goes on training, as does everybody."""
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm, steps_per_epoch=1000, epochs=1):
        steps(model, optimizer, after)
        if rank == 1:
            optimizer.param_groups[0]["lr"] = 0.01
        steps(model, optimizer, 2)
        if back:
            optimizer.param_groups[0]["lr"] = 0.05
            steps(model, optimizer, 1)
            return
        for _ in range(400):
            time.sleep(0.05)
            steps(model, optimizer, 1)


def written(algorithm: str) -> None:
    """Rank 1 alone loads weights in mid training; all are told, and what it came to is in `warned`."""
    model = wrapped()
    optimizer = sgd(model)
    warned: list[str] = []
    ear = logging.Handler(logging.WARNING)
    ear.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tacit").addHandler(ear)
    with tacit.attach(model, optimizer, algorithm):
        steps(model, optimizer, 10)
        if rank == 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape) * p.std())
        for _ in range(40):
            time.sleep(0.05)
            steps(model, optimizer, 1)
    logging.getLogger("tacit").removeHandler(ear)
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, warned)
    assert same_on_all_ranks(flat(model))
    raise Warning(" | ".join(each for texts in every for each in texts))


def loaded() -> None:
    """Rank 1 alone loads weights, is refused a step, and closes its session in the middle of a period."""
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "localsgd:sync_every=40"):
        steps(model, optimizer, 5)
        try:
            if rank == 1:
                with torch.no_grad():
                    for p in model.parameters():
                        p.fill_(0.1)
            steps(model, optimizer, 2)
        except tacit.AttachError:
            return
        for _ in range(400):
            time.sleep(0.05)
            steps(model, optimizer, 1)


def scheduled() -> None:
    """All change it alike, at a rate that each computes."""
    model = wrapped()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    with tacit.attach(model, optimizer, "localsgd:sync_every=4"):
        for _ in range(40):
            time.sleep(0.02 * (rank == 1))
            steps(model, optimizer, 1)
            schedule.step()
    assert same_on_all_ranks(flat(model))


SCENARIOS: dict[str, Callable[[], object]] = {
    "ddp here": lambda: attached("ddp", "topk:ratio=0.1"),
    "ddp there": lambda: attached("localsgd:sync_every=4", "ddp"),
    "other arguments": lambda: attached("topk:ratio=0.1", "topk:ratio=0.2"),
    "ddp, rates": lambda: attached("ddp", "ddp", lr=0.01),
    "dense, rates": lambda: attached("dense", "dense", lr=0.01),
    "localsgd, rates": lambda: attached("localsgd:sync_every=4", "localsgd:sync_every=4", lr=0.01),
    "the same": scheduled,
    "written, topk": lambda: written("topk:ratio=0.1"),
    "loaded": loaded,
    "for a while": lambda: changed("dense", 10, back=True),
    "later, powersgd": lambda: changed("powersgd:rank=1", 10),
    "later, localsgd": lambda: changed("localsgd:sync_every=4", 10),
    "later, ddp": lambda: changed("ddp", 10),
}

for name in SCENARIOS:
    said(name, SCENARIOS[name])
    if name != "later, ddp":  # which ends the default group
        dist.barrier()
os._exit(0)  # collectives that were given up still hang in Gloo
