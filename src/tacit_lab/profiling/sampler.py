"""Samples of what the threads of this process execute, taken by the kernel: `perf_event_open`.

The kernel writes one for every millisecond of processor time into memory that it shares with this process, so
that taking them needs no thread and no lock of Python's. No other program is needed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tacit.errors import TacitError

__all__ = ["FREQUENCY", "Denied", "Sample", "Sampler", "parse"]

FREQUENCY = 997
"""Samples a second of processor time; a prime, so that nothing keeps step with it."""
_CALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES = 112
_SOFTWARE, _CPU_CLOCK = 1, 0
_IP, _TID, _TIME, _CALLCHAIN = 1, 2, 4, 32
_DISABLED, _INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 0, 1 << 1, 1 << 5, 1 << 6
_FREQUENT, _USE_CLOCK = 1 << 10, 1 << 25
_MONOTONIC = 1
_DEPTH = 48
_ENABLE, _DISABLE = 0x2400, 0x2401
_LOST, _SAMPLE = 2, 9
_HEAD = 1024
_PAGES = (1024, 512, 128, 32, 8)
_MARKS, _IN_KERNEL, _USER_HALF = (1 << 64) - 4096, (1 << 64) - 128, 1 << 47
_PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


class Denied(TacitError):
    """The kernel does not let this process be sampled; the message names the setting."""


@dataclass(frozen=True)
class Sample:
    """What one thread was executing.

    Attributes:
        at: Nanoseconds of the monotonic clock.
        tid: The system's number of the thread.
        addresses: Innermost first, those of the kernel before those of the program.
    """

    at: int
    tid: int
    addresses: tuple[int, ...]


class Sampler:
    """Samples this thread, and all threads that it and they begin later.

    Raises:
        Denied: The kernel does not permit it.

    Attributes:
        sees_kernel: Whether samples say what the kernel does for a thread.
        lost: How many samples found no room.
    """

    def __init__(self) -> None:
        self.sees_kernel = True
        self.lost = 0
        self._taken: list[bytes] = []
        self._buffers: list[tuple[int, mmap.mmap]] = []
        try:
            self._open_all()
        except PermissionError:
            self.close()
            self.sees_kernel = False
            self._open_all()

    def _open_all(self) -> None:
        try:
            for cpu in sorted(os.sched_getaffinity(0)):
                handle = _open(cpu, self.sees_kernel)
                self._buffers.append((handle, _shared(handle)))
        except Denied:
            self.close()
            raise
        except PermissionError:
            if self.sees_kernel:
                raise
            self.close()
            raise Denied(_why()) from None
        except OSError as error:
            self.close()
            raise Denied(f"this kernel takes no samples of programs: {error}") from None

    def start(self) -> None:
        """Take samples from now on."""
        for handle, _ in self._buffers:
            fcntl.ioctl(handle, _ENABLE, 0)

    def stop(self) -> None:
        """Take no more."""
        for handle, _ in self._buffers:
            fcntl.ioctl(handle, _DISABLE, 0)

    def take(self) -> None:
        """Make room for others: copy what there is, to be read by `samples`."""
        for _, shared in self._buffers:
            size = len(shared) - mmap.PAGESIZE
            head, tail = struct.unpack_from("QQ", shared, _HEAD)
            start, stop = tail % size, head % size
            if head != tail:
                pieces = [(start, stop)] if start < stop else [(start, size), (0, stop)]
                self._taken.append(b"".join(shared[mmap.PAGESIZE + a : mmap.PAGESIZE + b] for a, b in pieces))
                struct.pack_into("Q", shared, _HEAD + 8, head)

    def samples(self) -> list[Sample]:
        """All that were taken of this process, in the order of their times."""
        found: list[Sample] = []
        for data in self._taken:
            samples, lost = parse(data, os.getpid())
            self.lost += lost
            found += samples
        self._taken = []
        return sorted(found, key=lambda each: each.at)

    def close(self) -> None:
        """Give the memory back."""
        for handle, shared in self._buffers:
            shared.close()
            os.close(handle)
        self._buffers = []


def parse(data: bytes, pid: int) -> tuple[list[Sample], int]:
    """The samples of this process in records of the kernel, and how many found no room.

    Args:
        data: Whole records, one after the other, as `perf_event_open(2)` describes them.
    """
    found, lost, at = [], 0, 0
    while at + 8 <= len(data):
        kind, _, size = struct.unpack_from("IHH", data, at)
        if size < 8:
            break
        if kind == _SAMPLE:
            _, process, tid, when, depth = struct.unpack_from("QIIQQ", data, at + 8)
            if process == pid:
                chain = struct.unpack_from(f"{depth}Q", data, at + 40)
                found.append(Sample(when, tid, tuple(_addresses(chain))))
        elif kind == _LOST:
            lost += struct.unpack_from("Q", data, at + 16)[0]
        at += size
    return found, lost


def _addresses(chain: tuple[int, ...]) -> Iterator[int]:
    """Those of the kernel, and then of the program; without the marks between them, and what cannot be."""
    kernel = False
    for address in chain:
        if address >= _MARKS:
            kernel = address == _IN_KERNEL
        elif kernel or address < _USER_HALF:
            yield address


def _open(cpu: int, kernel: bool) -> int:
    number = _CALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"{platform.machine()} is not known here")
    flags = _DISABLED | _INHERIT | _EXCLUDE_HV | _FREQUENT | _USE_CLOCK | (0 if kernel else _EXCLUDE_KERNEL)
    kinds = _IP | _TID | _TIME | _CALLCHAIN
    first = struct.pack("IIQQQQQ", _SOFTWARE, _ATTRIBUTES, _CPU_CLOCK, FREQUENCY, kinds, 0, flags)
    rest = struct.pack("IIQQQQIiQIHH", 0, 0, 0, 0, 0, 0, 0, _MONOTONIC, 0, 0, _DEPTH, 0)
    attributes = (first + rest).ljust(_ATTRIBUTES, b"\0")
    system = ctypes.CDLL(None, use_errno=True)
    handle = int(system.syscall(number, attributes, 0, cpu, -1, 8))
    if handle < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return handle


def _shared(handle: int) -> mmap.mmap:
    """Memory for samples, as much as this user may lock."""
    for pages in _PAGES:
        with suppress(PermissionError):
            return mmap.mmap(handle, mmap.PAGESIZE * (1 + pages))
    raise Denied(
        "this process may lock no memory for samples: write sysctl kernel.perf_event_mlock_kb=2000 as root, "
        "or raise ulimit -l"
    )


def _why() -> str:
    level = _PARANOID.read_text().strip() if _PARANOID.exists() else "missing"
    return (
        f"the kernel does not let this process be sampled (kernel.perf_event_paranoid is {level}): write "
        "sysctl kernel.perf_event_paranoid=1 as root, and in a container permit perf_event_open"
    )
