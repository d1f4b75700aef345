"""Who has sent how much to whom: what each node counts of the others, put together."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.environment import NODE, NODES, SERVERS
from tacit_lab.testbed.network import peers

TrafficMatrix = list[list[int]]
"""Bytes from each node, row by row, to each: first the nodes with ranks, then those of the servers."""


class Traffic:
    """Bytes from node to node, summed over windows.

    Args:
        nodes: that have ranks.
        servers: how many nodes come after them, which count nothing themselves: what they sent is what the
            others received of them.
        node: this one; None where this process is to count nothing.
    """

    def __init__(self, nodes: int, servers: int, node: int | None) -> None:
        self._nodes, self._places, self._node = nodes, nodes + servers, node
        self._total = torch.zeros(self._places, self._places, dtype=torch.float64)

    def read(self) -> Tensor:
        """This node's number, and its counters up to now: what it sent to each place, and received from each.

        The number is -1 of a process that is to count nothing; counters that are not there are NaN.
        """
        found = torch.full((1 + 2 * self._places,), math.nan, dtype=torch.float64)
        if self._node is None:
            found.zero_()[0] = -1
            return found
        found[0] = self._node
        counted = peers.read()
        if counted is not None:
            for at, each in enumerate(counted):
                values = [each.get(place, 0) for place in range(self._places)]
                start = 1 + at * self._places
                found[start : start + self._places] = torch.tensor(values, dtype=torch.float64)
        return found

    def add(self, counted: Tensor) -> None:
        """Add a window: of each process its number, and by how much its counters have grown."""
        for number, *values in counted.tolist():
            if number < 0:
                continue
            sent, received = values[: self._places], values[self._places :]
            node = int(number)
            self._total[node] += torch.tensor(sent, dtype=torch.float64)
            self._total[self._nodes :, node] += torch.tensor(received[self._nodes :], dtype=torch.float64)

    @property
    def matrix(self) -> TrafficMatrix | None:
        """The sums; None if a node could not count."""
        if self._total.isnan().any():
            return None
        return [[int(each) for each in row] for row in self._total.tolist()]


def here(reads: bool) -> Traffic:
    """Of the testbed in which this process is. `reads`: whether it is the one of its node that counts."""
    servers: Sequence[str] = os.environ.get(SERVERS, "").split(",")
    count = sum(1 for each in servers if each)
    return Traffic(int(os.environ.get(NODES, "1")), count, int(os.environ.get(NODE, "0")) if reads else None)
