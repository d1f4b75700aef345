"""Makes what nodes send arrive later, where the kernel has no netem: a process that all packets pass.

What a node has sent, at its link's rate, is redirected to a TAP interface instead of the bridge's port. This
process reads it there, keeps it until its time has come, and writes it back, whereby it enters the bridge. A
packet is whole as TCP handed it down, up to 64 KB, so that few are carried each second.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import os
import select
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tacit.errors import TestbedError
from tacit_lab.testbed.network.nodes import mac

NAME = "tacit-relay"
"""What the process is called by `ps` and `top`, and its interface."""
_TUN = "/dev/net/tun"
_SET_INTERFACE, _SET_OFFLOAD = 0x4004_54CA, 0x4004_54D0
_TAP, _NO_PROTOCOL, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TCP_SEGMENTS = 1, 2 | 8
_HEADER = 10  # of virtio: what is left of the checksum, and how to cut the packet
_SENDER = slice(_HEADER + 6, _HEADER + 12)
_LARGEST = _HEADER + 14 + (1 << 16)
_QUEUE = 10_000
_PRIORITY = 1
_ALL_PROTOCOLS, _ANY_CLASS = 3, 0x10000
_OF_BRIDGE, _STATIC = 4, 0x40


class Relay:
    """A TAP interface at the bridge, in the network of the calling process.

    Attributes:
        device: its open file.
    """

    def __init__(self, routes: Any, bridge: int, latencies: Sequence[float]) -> None:
        """Make the interface.

        Args:
            routes: An `IPRoute` of this network.
            bridge: The bridge's index.
            latencies: How many seconds later what a node sends arrives, for each node.

        Raises:
            TestbedError: there is no TUN device.
        """
        try:
            self.device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            wanted = struct.pack("16sH22x", NAME.encode(), _TAP | _NO_PROTOCOL | _WITH_HEADER)
            fcntl.ioctl(self.device, _SET_INTERFACE, wanted)
            fcntl.ioctl(self.device, _SET_OFFLOAD, _CHECKSUM | _TCP_SEGMENTS)
        except OSError as error:
            raise TestbedError(
                "this kernel cannot emulate latency: it lacks the module sch_netem, and a relay in its place "
                f"needs {_TUN}, which cannot be opened ({error.strerror}). Load its module (modprobe tun), "
                f"run as root, in a container with --device {_TUN}, or leave the latency out."
            ) from error
        self._latencies = latencies
        self._routes = routes
        self._link = int(routes.link_lookup(ifname=NAME)[0])
        routes.link("set", index=self._link, master=bridge, txqlen=_QUEUE, state="up")
        # The bridge must not take it for the way to those whose packets come from it.
        routes.brport("set", index=self._link, learning=0, unicast_flood=0)

    def intercept(self, port: int, node: int) -> None:
        """Have all come here that the bridge's port of a node receives."""
        self._routes.tc("add", "ingress", port, handle="ffff:")
        here = {"kind": "mirred", "direction": "egress", "action": "redirect", "ifindex": self._link}
        every = {"protocol": _ALL_PROTOCOLS, "target": _ANY_CLASS, "keys": ["0x0/0x0+0"]}
        self._routes.tc("add-filter", "u32", port, parent="ffff:", action=here, **every)
        self._routes.fdb("add", ifindex=port, lladdr=mac(node), flags=_OF_BRIDGE, state=_STATIC)

    def carry(self) -> NoReturn:
        """Hand on packets, for ever; before ranks, where that is permitted, as they would be late else."""
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        gc.disable()
        device, now = self.device, time.monotonic
        latencies = {
            bytes.fromhex(mac(node).replace(":", "")): each for node, each in enumerate(self._latencies)
        }
        waiting: list[tuple[float, int, bytes]] = []
        number = 0
        while True:
            select.select([device], [], [], max(0.0, waiting[0][0] - now()) if waiting else None)
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, _LARGEST)
                    latency = latencies.get(packet[_SENDER])
                    if latency is not None:  # else it is of the bridge itself
                        heapq.heappush(waiting, (now() + latency, number, packet))
                        number += 1
            time_now = now()
            while waiting and waiting[0][0] <= time_now:
                os.write(device, heapq.heappop(waiting)[2])
