"""The network of this process's namespace: bytes sent by its interfaces, their speed, and what TCP does."""

from __future__ import annotations

import ctypes
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE = Path("/proc/self/net/dev")
_SEGMENTS = Path("/proc/self/net/snmp")
_DEVICES = Path("/sys/class/net")
_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_SENT = 8
"""The column of bytes sent, after the eight columns of what was received."""
_GET_FLAGS, _GET_ADDRESS, _ETHTOOL = 0x8913, 0x8915, 0x8946
_UP = 0x1
_GET_SETTINGS = 0x1
"""Ethtool's command for the negotiated speed of a link."""
_UNKNOWN = (0, 0xFFFF, 0xFFFFFFFF)


@dataclass(frozen=True)
class Interface:
    """A network interface that is up and has an IPv4 address.

    Attributes:
        name: such as "eth0"; "lo" too.
        sent: bytes since it was made.
        rate: its reported speed in bit/s; None: not reported.
        physical: whether it is a device, and no bridge or container's.
    """

    name: str
    sent: int
    rate: float | None
    physical: bool = False


def _ioctl(asked: socket.socket, request: int, argument: Any) -> bytes:
    import fcntl  # not every system has it

    answer: bytes = fcntl.ioctl(asked, request, argument)
    return answer


def sent_bytes() -> dict[str, int]:
    """The bytes that each interface has sent since it was made, up or not, by name."""
    if not _TABLE.exists():
        return {}
    lines = (line.partition(":") for line in _TABLE.read_text().splitlines()[2:])
    return {name.strip(): int(numbers.split()[_SENT]) for name, _, numbers in lines}


def interfaces() -> list[Interface]:
    """All interfaces that are up; none where the system does not list them."""
    found = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for name, sent in sent_bytes().items():
            if _usable(asked, name):
                found.append(Interface(name, sent, _rate(asked, name), (_DEVICES / name / "device").exists()))
    return found


def address_of(name: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or there is no such interface."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            return socket.inet_ntoa(_ioctl(asked, _GET_ADDRESS, request)[20:24])
    except OSError:
        return None


@dataclass(frozen=True)
class Segments:
    """Segments of TCP that all processes here have sent since the machine, or container, was started.

    Attributes:
        sent: all of them.
        again: those that were sent before, as nobody had acknowledged them.
    """

    sent: int = 0
    again: int = 0

    def resent_since(self, before: Segments) -> float:
        """The share of what was sent since then that had been sent before."""
        return (self.again - before.again) / max(1, self.sent - before.sent)


def segments() -> Segments:
    """What TCP has sent; nothing where the system does not count it."""
    with suppress(OSError, ValueError, KeyError):
        names, counts = (line.split() for line in _SEGMENTS.read_text().splitlines() if line[:4] == "Tcp:")
        counted = dict(zip(names, counts, strict=True))
        return Segments(int(counted["OutSegs"]), int(counted["RetransSegs"]))
    return Segments()


def congestion_control() -> str:
    """The congestion control of new TCP connections, such as "cubic"; "" if the kernel does not report it."""
    with suppress(OSError):
        return _CONTROL.read_text().strip()
    return ""


def _usable(asked: socket.socket, name: str) -> bool:
    """Whether the interface is up and has an address."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        (flags,) = struct.unpack_from("H", _ioctl(asked, _GET_FLAGS, request), 16)
        _ioctl(asked, _GET_ADDRESS, request)
    except OSError:
        return False
    return bool(flags & _UP)


def _rate(asked: socket.socket, name: str) -> float | None:
    # The request points to the settings: command, supported and advertised modes, and the speed in two
    # halves.

    settings = ctypes.create_string_buffer(struct.pack("I40x", _GET_SETTINGS), 44)
    request = struct.pack("16sP16x", name.encode()[:15], ctypes.addressof(settings))
    try:
        _ioctl(asked, _ETHTOOL, request)
    except OSError:
        return None
    low, high = struct.unpack_from("H", settings, 12)[0], struct.unpack_from("H", settings, 28)[0]
    megabits = low | high << 16
    return None if megabits in _UNKNOWN else megabits * 1e6
