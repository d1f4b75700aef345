"""Ranks that add up, then move bytes inside a node and between nodes, and say what the interfaces saw."""

import json
import os
import time

import torch
import torch.distributed as dist

from tacit_lab.testbed.network import counters, peers

INTERFACE = os.environ["TACIT_INTERFACE"]
SIZE = 6_000_000


def move(source: int, target: int) -> dict[str, float]:
    """One transfer, as the sender and the receiver see it."""
    rank, buffer = dist.get_rank(), torch.zeros(SIZE, dtype=torch.uint8)
    sent, got, start = counters.transmitted(INTERFACE), counters.received(INTERFACE), time.monotonic()
    if rank == source:
        dist.send(buffer, target)
        dist.recv(buffer[:1], target)
    elif rank == target:
        dist.recv(buffer, source)
        seconds = time.monotonic() - start
        got = counters.received(INTERFACE) - got
        dist.send(buffer[:1], source)
        return {"received": got, "seconds": seconds}
    return {"sent": counters.transmitted(INTERFACE) - sent}


dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
facts = {"rank": dist.get_rank(), "world": dist.get_world_size(), "total": total.item()}
facts["local"], facts["node"] = int(os.environ["LOCAL_RANK"]), int(os.environ["TACIT_NODE"])
for name, pair in (("near", (0, 1)), ("far", (0, 2))):
    dist.barrier()
    time.sleep(0.2)  # the barrier's own last bytes
    if dist.get_rank() in pair:
        facts[name] = move(*pair)
    time.sleep(2.0 if dist.get_rank() not in pair else 0.0)  # others keep off the links
dist.barrier()
time.sleep(0.2)
facts["totals"] = counters.transmitted(INTERFACE), counters.received(INTERFACE)
facts["peers"] = peers.read()
dist.barrier()
print(json.dumps(facts))
dist.destroy_process_group()
