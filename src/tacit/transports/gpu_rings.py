"""Rates and latencies of NCCL's collectives, by events in the GPU's stream: of all ranks, and of a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from tacit.moments import Watch
from tacit.transports.process_groups import backend_on, own_groups, rank_in, ranks_of

_BYTES, _MORE = 4 << 20, 16
"""The size of the message that shows a rate; and how many times that where it is done at once."""
_LONG_ENOUGH = 0.005
_BUDGET = 0.25
"""The seconds after which no more are sent."""
_MOST = 20


def ring(
    group: dist.ProcessGroup,
    places: Sequence[int],
    device: torch.device,
    timeout: timedelta = timedelta(seconds=60),
) -> tuple[float, float]:
    """Measure all-reduces on the GPU, of one number and of some megabytes. A collective call of these ranks.

    Args:
        group: of the model, with a backend for GPUs.
        places: the ranks that take part, counted within the group: two at least.
        device: this rank's.

    Returns:
        The bytes a second that a rank sends in a ring, and the seconds of the smallest one; equal on these
        ranks.
    """
    # Only in tests is it another backend than NCCL, from memory that stands for a GPU's.
    backend = "nccl" if backend_on(group, torch.device("cuda")) == "nccl" else "gloo"
    own = own_groups(group, places, timeout, backend, (0, "probe"), 1)[0]
    least, size = _averaged(1, own, device), _BYTES
    large = _averaged(size // 4, own, device)
    if large < _LONG_ENOUGH:
        size *= _MORE
        large = _averaged(size // 4, own, device)
    sent = 2 * (len(places) - 1) / len(places) * size
    return sent / max(large - least, large / 10), least


def _averaged(numel: int, group: dist.ProcessGroup, device: torch.device) -> float:
    """The seconds of an all-reduce, the mean of as many as fit into the budget; the largest of all ranks."""
    data = torch.zeros(numel, dtype=torch.float32, device=device)
    watch, send = Watch(device=device), partial(dist.all_reduce, data, group=group)
    send()  # the first one of a group connects
    longest = _longest(watch.took(send), group, device)
    count = min(_MOST, max(2, int(_BUDGET / max(longest, 1e-6))))
    return _longest(watch.took(send, count), group, device)


def _longest(seconds: float, group: dist.ProcessGroup, device: torch.device) -> float:
    found = torch.tensor([seconds], dtype=torch.float32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)


def near_ring(
    group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], device: torch.device
) -> tuple[float, float]:
    """As `ring`, of this rank's node; infinite and 0 where it has one rank."""
    me = ranks_of(group).index(rank_in())
    mine = next(node for node in nodes if me in node)
    return ring(group, mine, device) if len(mine) > 1 else (math.inf, 0.0)
