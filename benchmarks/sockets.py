"""How many connections an attach opens: ranks of Gloo, forked on this machine, count their own.

    python benchmarks/sockets.py                 # about a minute
    TACIT_CONNECTIONS=4 python benchmarks/sockets.py --ranks 32 --algorithm dense

A line for each number of ranks: the first rank's established connections after `init_process_group` and DDP,
and after an attach and three steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path

_PORT, _LONGEST = 29_777, 600.0
_ESTABLISHED = "01"


def connections() -> int:
    """The established connections of this process."""
    ours = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            ours.add(os.readlink(each))
        except FileNotFoundError:  # that of the listing itself
            continue
    rows = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    return sum(row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in ours for row in rows)


def rank_main(rank: int, ranks: int, algorithm: str) -> None:
    """Attach, train three steps, and tell at the first rank."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import tacit

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = connections()
    session = tacit.attach(model, optimizer, algorithm)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
    after = connections()
    dist.barrier()
    if not rank:
        print(
            json.dumps({"ranks": ranks, "algorithm": algorithm, "before": before, "attached": after}),
            flush=True,
        )
    del session  # it is not closed: the ranks end together


def forked(ranks: int, algorithm: str) -> None:
    """Fork the ranks, and wait until the first has told."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_PORT + ranks), GLOO_SOCKET_IFNAME="lo")
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            try:
                rank_main(rank, ranks, algorithm)
            finally:
                os._exit(0)
        children.append(child)
    until = time.monotonic() + _LONGEST
    while time.monotonic() < until and os.waitpid(children[0], os.WNOHANG) == (0, 0):
        time.sleep(0.1)
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def main() -> None:
    """Count for each number of ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 32, 64])
    parser.add_argument("--algorithm", default="topk")
    options = parser.parse_args()
    import torch

    import tacit.algorithms  # noqa: F401  # so that the ranks have it

    torch.set_num_threads(1)
    for ranks in options.ranks:
        forked(ranks, options.algorithm)


if __name__ == "__main__":
    main()
