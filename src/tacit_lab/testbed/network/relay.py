"""Makes what nodes send arrive later, where the kernel has no netem: a process that all packets pass.

What a node has sent, at its link's rate, is redirected to a TAP interface instead of the bridge's port. This
process reads it there, keeps it until its time has come, and writes it back, whereby it enters the bridge; or
loses it. A packet is whole as TCP handed it down, up to 64 KB, so that few are carried each second; where
packets are lost, or differ in their latency, each is alone, as on the link.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import heapq
import mmap
import os
import random
import select
import struct
import time
from typing import Any, NoReturn

from tacit.errors import TestbedError
from tacit_lab.cluster import Cluster
from tacit_lab.testbed.network.nodes import mac

NAME = "tacit-relay"
"""What the process is called by `ps` and `top`, and its interface."""
_TUN = "/dev/net/tun"
_SET_INTERFACE, _SET_OFFLOAD = 0x4004_54CA, 0x4004_54D0
_TAP, _NO_PROTOCOL, _WITH_HEADER = 0x0002, 0x1000, 0x4000
_CHECKSUM, _TCP_SEGMENTS = 1, 2 | 8
_HEADER = 10  # of virtio: what is left of the checksum, and how to cut the packet
_RECEIVER, _SENDER = slice(_HEADER, _HEADER + 6), slice(_HEADER + 6, _HEADER + 12)
_LARGEST = _HEADER + 14 + (1 << 16)
_QUEUE = 10_000
_PRIORITY = 1
_OWN = 0.15e-3
"""Seconds that a packet takes through here by itself: the system wakes this process that late."""
_PAUSE, _SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 1e-4, 3e-4
"""Between two looks: a share of the latency, and seconds."""
_WINDOW = 1.0
_SHARED = 4 * 8
_ALL_PROTOCOLS, _ANY_CLASS = 3, 0x10000
_OF_BRIDGE, _STATIC = 4, 0x40


def needed(cluster: Cluster) -> bool:
    """Whether packets of a cluster are late or lost."""
    places = range(cluster.places)
    return cluster.sites > 1 or any(
        cluster.latency_of(node) or cluster.impairment_of(node).of_single_packets for node in places
    )


class Relay:
    """A TAP interface at the bridge, in the network of the calling process, and what serves it."""

    def __init__(self, routes: Any, bridge: int, cluster: Cluster) -> None:
        """Make the interface.

        Args:
            routes: An `IPRoute` of this network.
            bridge: The bridge's index.
            cluster: Says how late what a node sends is, and how much is lost.

        Raises:
            TestbedError: there is no TUN device.
        """
        self._counted = memoryview(mmap.mmap(-1, _SHARED)).cast("d")
        self._links: dict[bytes, tuple[float, float, float]] = {}
        self._sites: dict[bytes, int] = {}
        self._apart = cluster.apart
        for node in range(cluster.places):
            impairment, sender = cluster.impairment_of(node), bytes.fromhex(mac(node).replace(":", ""))
            self._links[sender] = (cluster.latency_of(node), impairment.jitter, impairment.loss)
            self._sites[sender] = cluster.site_of(node)
        alone = any(jitter or loss for _, jitter, loss in self._links.values())
        try:
            self._device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            wanted = struct.pack("16sH22x", NAME.encode(), _TAP | _NO_PROTOCOL | _WITH_HEADER)
            fcntl.ioctl(self._device, _SET_INTERFACE, wanted)
            fcntl.ioctl(self._device, _SET_OFFLOAD, 0 if alone else _CHECKSUM | _TCP_SEGMENTS)
        except OSError as error:
            raise TestbedError(
                "this kernel cannot emulate latency or loss: it lacks the module sch_netem, and a relay in "
                f"its place needs {_TUN}, which cannot be opened ({error.strerror}). Load its module "
                f"(modprobe tun), run as root, in a container with --device {_TUN}, or leave them out."
            ) from error
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

    def told(self) -> list[float]:
        """The most of a core that it took in any second, and two means over all packets of the last run.

        These are the seconds by which they should have been late, and those by which they were later.
        """
        busiest, packets, due, late = self._counted
        return [busiest, due / max(packets, 1.0), late / max(packets, 1.0)]

    def carry(self) -> NoReturn:
        """Hand on packets, for ever; before ranks, where that is permitted, as they would be late else."""
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        gc.disable()
        device, links, now, chance = self._device, self._links, time.monotonic, random.random
        counted, apart, sites = self._counted, self._apart, self._sites
        counted[0] = counted[1] = counted[2] = counted[3] = 0.0
        window, processor = now() + _WINDOW, time.process_time()
        pause = min((latency for latency, *_ in links.values() if latency), default=0.0) * _PAUSE
        pause = min(pause, _LONGEST_PAUSE) if pause >= _SHORTEST_PAUSE else 0.0
        early = _OWN + pause  # half of a pause before it is read, and half before it is written
        waiting: list[tuple[float, int, bytes]] = []
        number = 0
        while True:
            if not waiting:
                select.select([device], [], [])
            elif pause:  # to be woken by each packet takes more than to carry it
                time.sleep(pause)
            else:
                select.select([device], [], [], max(0.0, waiting[0][0] - now()))
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, _LARGEST)
                    link = links.get(packet[_SENDER])
                    if link is None:  # it is of the bridge itself
                        continue
                    latency, jitter, loss = link
                    if apart:
                        site = sites[packet[_SENDER]]
                        if sites.get(packet[_RECEIVER], site) != site:  # none of a broadcast
                            latency = apart
                    if loss and chance() < loss:
                        continue
                    if jitter:
                        latency += jitter * (2 * chance() - 1)
                    heapq.heappush(waiting, (now() + max(0.0, latency - early), number, packet))
                    counted[1] += 1
                    counted[2] += latency
                    number += 1
            moment = now()
            while waiting and waiting[0][0] <= moment:
                due, _, packet = heapq.heappop(waiting)
                os.write(device, packet)
                counted[3] += moment - due
            if moment >= window:
                busy = (time.process_time() - processor) / (moment - window + _WINDOW)
                counted[0] = max(counted[0], busy)
                window, processor = moment + _WINDOW, time.process_time()
