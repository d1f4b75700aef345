"""One rank of a world in which the last rank leaves out a collective; all give up, and it ends last."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tacit.contracts import AllReduce
from tacit.transports.started_collectives import Later
from tacit.transports.torch_distributed import TorchTransport

KEPT: list[dist.ProcessGroup] = []
"""Groups that live as long as the interpreter, as those that a traceback refers to."""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=1000))
    last = dist.get_rank() == dist.get_world_size() - 1
    transport = TorchTransport(dist.group.WORLD, timedelta(seconds=1000))
    transport.open({"world": 2})
    posted = None
    if not last:
        KEPT.extend(transport._groups.values())
        posted = transport.post(AllReduce((torch.ones(1000),), "world"), 1, "bucket")
        assert isinstance(posted, Later)
        posted.on_done(lambda: None)
    dist.barrier()
    transport.abort(RuntimeError("this rank gives up"))
    assert posted is None or posted.hangs()
    transport.close()
    dist.destroy_process_group()
    if last:
        time.sleep(1.5)  # so that the others end before


if __name__ == "__main__":
    main()
