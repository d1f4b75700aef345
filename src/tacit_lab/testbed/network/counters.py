"""The number of bytes that a network interface has carried, from the kernel's counters.

The numbers are those of the network namespace of the calling process: inside a rank of a testbed, the
node's own link. Traffic between the ranks of one node does not cross it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tacit.environment import CLUSTER, INTERFACE, NODE
from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed.network import background

_TABLE = Path("/proc/self/net/dev")
_RECEIVED, _TRANSMITTED = 0, 8


def transmitted(interface: str) -> int:
    """Bytes that the interface has sent since it was made, without those of a background load."""
    sent = _counter(interface, _TRANSMITTED)
    if _is_loaded(os.environ.get(CLUSTER, ""), os.environ.get(NODE, "")):
        sent -= background.WIRE_BYTES * background.datagrams()
    return sent


@cache
def _is_loaded(cluster: str, node: str) -> bool:
    """Whether this is a node of a testbed with a background load."""
    return bool(cluster and node) and Cluster.parse(cluster).load_of(int(node)) > 0


def received(interface: str) -> int:
    """Bytes that the interface has received since it was made."""
    return _counter(interface, _RECEIVED)


def _counter(interface: str, column: int) -> int:
    names = []
    for line in _TABLE.read_text().splitlines()[2:]:
        name, _, values = line.partition(":")
        names.append(name.strip())
        if names[-1] == interface:
            return int(values.split()[column])
    raise TestbedError(
        f"this process sees no network interface {interface!r}, only {', '.join(names)}. "
        f"Inside a testbed, {INTERFACE} names the node's interface."
    )
