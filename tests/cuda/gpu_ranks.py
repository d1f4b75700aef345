"""Ranks of Gloo that share a GPU; run by `test_two_ranks`."""

import json
import os
import secrets
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_training import CUDA, batches, flat, network, on, sgd, steps, wrapped

import tacit
from tacit.algorithms import parse
from tacit.attaching.requirements import needs_servers
from tacit_lab.testbed.launch import free_port

ALGORITHMS = [
    "ddp", "dense", "topk:ratio=0.05", "dgc:ratio=0.05", "powersgd", "efsign", "qsgd", "int8",
    "gtopk:ratio=0.05", "threshold:tau=0.01", "pipesgd", "localsgd:sync_every=3",
    "diloco:sync_every=3,bits=4", "ednncomm:sync_every=2",
    "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=2,bits=4",
    "uneven", "adacomm:sync_every=3", "sparseloco:sync_every=3", "muloco:sync_every=3", "desloc:sync_every=3",
    "dilocox:sync_every=3", "gossip", "sgp", "gossip-pga", "choco", "dcd", "deepsqueeze", "wagma", "prague",
    "noloco", "adpsgd", "lowbit", "mp2", "predictive:sync_every=3",
    "ps", "ps-topk", "ps-dgc", "ps-async", "ps-ssp",
]  # fmt: skip
IN_ANY_ORDER = ("adpsgd", "async-diloco", "ps-async", "ps-ssp", "uneven")
"""What these lead to depends on who comes first, or how long steps take: it is held that they train."""
DEVICE = CUDA if torch.cuda.is_available() else torch.device("cpu")
"""The CPU only to try this file."""


@contextmanager
def servers(algorithm: str) -> Iterator[list[str] | None]:
    """A parameter server, where the algorithm needs one."""
    if not needs_servers(parse(algorithm)):
        yield None
        return
    where = [None]
    if dist.get_rank() == 0:
        where = [free_port()]
        words = ["--workers", str(dist.get_world_size()), "--port", str(where[0])]
        process = subprocess.Popen([sys.executable, "-m", "tacit.stores.server", *words])
    dist.broadcast_object_list(where)
    try:
        yield [f"127.0.0.1:{where[0]}"]
    finally:
        if dist.get_rank() == 0:
            process.terminate()
            process.wait(20)


def run(algorithm: str, device: torch.device) -> torch.Tensor:
    model = wrapped(network(device))
    optimizer = sgd(model)
    known = {"steps_per_epoch": 5, "epochs": 4}
    with (
        servers(algorithm) as at,
        tacit.attach(model, optimizer, algorithm, servers=at, **known) as session,
    ):
        steps(model, optimizer, on(device, batches(10, dist.get_rank())), session.observe)
    found = flat(model).cpu()
    both = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(both, found)
    assert all(torch.equal(each, found) for each in both), "ranks differ"
    assert found.isfinite().all()
    return found


def main() -> None:
    torch.set_num_threads(1)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    key = [secrets.token_hex(16)]
    dist.broadcast_object_list(key)
    os.environ["TACIT_SERVER_SECRET"] = key[0]
    for algorithm in sys.argv[1:] or ALGORITHMS:
        error, apart = None, 0.0
        try:
            found, expected = run(algorithm, DEVICE), run(algorithm, torch.device("cpu"))
            if not algorithm.startswith(IN_ANY_ORDER):
                apart = float((found - expected).abs().max())
        except Exception:
            error = traceback.format_exc()
        sys.stdout.write(json.dumps({"algorithm": algorithm, "apart": apart, "error": error}) + "\n")
        sys.stdout.flush()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
