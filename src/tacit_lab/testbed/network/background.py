"""A background load: a process on a node that sends at a steady rate, to the switch, which drops it.

It uses the node's link, as a neighbour's traffic would. It is UDP: it does not give way to others.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import NoReturn

from tacit_lab.testbed.network.nodes import SWITCH

NAME = "tacit-load"
"""What such a process is called by `ps` and `top`."""
_PORT = 9  # "discard"
_FRAGMENTS, _FRAGMENT = 4, 1480
_PAYLOAD = _FRAGMENTS * _FRAGMENT - 8  # a datagram of several packets takes fewer calls
_HEADERS = 20 + 14
WIRE_BYTES = _FRAGMENTS * (_FRAGMENT + _HEADERS)
"""Bytes of each datagram as an interface counts them."""
_DEBT = 0.05
"""The most seconds of delayed traffic that it catches up on."""
_BUFFERED = 0.1
_LEAST_BUFFER = 1 << 18
_COUNTERS = Path("/proc/self/net/snmp")


def sink() -> socket.socket:
    """The switch's end; to be kept open. Nobody reads it, so that the kernel drops what comes."""
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
    found.bind((SWITCH, _PORT))
    return found


def send_at(rate: float) -> NoReturn:
    """Send so many bit/s of the link, for ever."""
    data, seconds = bytes(_PAYLOAD), 8 * WIRE_BYTES / rate
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        # Enough for what waits for the link, as a sender that is blocked falls behind.
        size = max(_LEAST_BUFFER, int(rate / 8 * _BUFFERED))
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        due = time.monotonic()
        while True:
            sender.sendto(data, (SWITCH, _PORT))
            now = time.monotonic()
            due = max(due + seconds, now - _DEBT)
            if due > now:
                time.sleep(due - now)


def datagrams() -> int:
    """How many UDP datagrams have left the node of the calling process."""
    names, values = (line.split() for line in _COUNTERS.read_text().splitlines() if line.startswith("Udp:"))
    return int(values[names.index("OutDatagrams")])
