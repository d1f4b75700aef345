"""What the kernel counts of each thread of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

__all__ = ["Counts", "counts", "names", "numbered", "running"]

_TASKS = Path("/proc/self/task")
_PURPOSES = {
    "gloo_tcp_loop": "Gloo: sockets",
    "pt_gloo_runloop": "Gloo: collectives",
    "pt_tcpstore_uv": "torch: store",
    "pt_autograd": "torch: autograd",
    "tacit-lane": "tacit: lane",
}
"""What threads are for, by how their names begin."""


@dataclass(frozen=True)
class Counts:
    """Of one thread since it began.

    Attributes:
        minor: Page faults without a disk, of pages of 4 KiB or larger; `major`: with one.
        voluntary: How often it gave its core away, to wait; `involuntary`: how often the core was taken.
        ready_ns: How long it was ready and had no core.
    """

    minor: int = 0
    major: int = 0
    voluntary: int = 0
    involuntary: int = 0
    ready_ns: int = 0

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


def running() -> list[int]:
    """The system's numbers of all threads of this process."""
    return sorted(int(each) for each in os.listdir(_TASKS))


def counts(tid: int) -> Counts:
    """What the kernel has counted of a thread.

    Raises:
        OSError: There is no such thread any more.
    """
    folder = _TASKS / str(tid)
    # After the name, which may hold anything, from the third field on: these are the 10th and the 12th.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if "ctxt" in line
    )
    ready = 0
    with suppress(FileNotFoundError):  # of a kernel without these statistics
        ready = int((folder / "schedstat").read_text().split()[1])
    return Counts(
        int(fields[7]),
        int(fields[9]),
        int(status["voluntary_ctxt_switches"]),
        int(status["nonvoluntary_ctxt_switches"]),
        ready,
    )


def names(tids: Iterable[int], main: int) -> dict[int, str]:
    """What each thread is for, of those that are there; `main` is the one that trains."""
    ours = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[int, str] = {}
    for tid in tids:
        with suppress(OSError):
            own = (_TASKS / str(tid) / "comm").read_text().strip()
            found[tid] = "main" if tid == main else _purpose(ours.get(tid, own))
    return found


def numbered(names: Mapping[int, str]) -> dict[int, str]:
    """The names, with numbers where several are equal."""
    alike: dict[str, list[int]] = {}
    for tid in sorted(names):
        alike.setdefault(names[tid], []).append(tid)
    return {
        tid: f"{name} {i}" if len(tids) > 1 else name
        for name, tids in alike.items()
        for i, tid in enumerate(tids, 1)
    }


def _purpose(name: str) -> str:
    for start, purpose in _PURPOSES.items():
        if name.startswith(start):
            return purpose
    return name
