"""The threads of this process, and what each is for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

_TASKS = Path("/proc/self/task")
_PURPOSES = {
    "gloo_tcp_loop": "Gloo: sockets",
    "pt_gloo_runloop": "Gloo: collectives",
    "pt_tcpstore_uv": "torch: store",
    "pt_autograd": "torch: autograd",
    "tacit-lane": "tacit: lane",
}
"""What threads are for, by how their names begin."""


def running() -> list[int]:
    """The system's numbers of all threads of this process."""
    return sorted(int(each) for each in os.listdir(_TASKS))


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
