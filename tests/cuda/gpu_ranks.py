"""Ranks of Gloo that share a GPU; run by `test_two_ranks`."""

import json
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from gpu_training import CUDA, batches, flat, network, on, sgd, steps, wrapped

import tacit

ALGORITHMS = [
    "ddp", "dense", "topk:ratio=0.05", "dgc:ratio=0.05", "powersgd", "efsign", "qsgd", "int8",
    "gtopk:ratio=0.05", "threshold:tau=0.01", "pipesgd", "localsgd:sync_every=3",
    "diloco:sync_every=3,bits=4", "ednncomm:sync_every=2",
    "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=2,bits=4",
]  # fmt: skip


def run(algorithm: str, device: torch.device) -> torch.Tensor:
    model = wrapped(network(device))
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm, steps_per_epoch=5, epochs=4) as session:
        steps(model, optimizer, on(device, batches(10, dist.get_rank())), session.observe)
    found = flat(model).cpu()
    both = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(both, found)
    assert all(torch.equal(each, found) for each in both), "ranks differ"
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for algorithm in ALGORITHMS:
        error, apart = None, 0.0
        try:
            apart = float((run(algorithm, CUDA) - run(algorithm, torch.device("cpu"))).abs().max())
        except Exception:
            error = traceback.format_exc()
        sys.stdout.write(json.dumps({"algorithm": algorithm, "apart": apart, "error": error}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
