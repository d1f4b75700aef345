"""The system calls that Python 3.11 does not offer: namespaces, mounts, and dying with the parent."""

from __future__ import annotations

import ctypes
import os
from enum import IntFlag

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


class Clone(IntFlag):
    """The namespaces that a process can leave or join."""

    MOUNT = 0x0002_0000
    UTS = 0x0400_0000
    USER = 0x1000_0000
    PID = 0x2000_0000
    NETWORK = 0x4000_0000


class Mount(IntFlag):
    """How to mount."""

    NOSUID = 2
    NODEV = 4
    NOEXEC = 8
    BIND = 4096
    RECURSIVE = 16384
    PRIVATE = 1 << 18


_DETACH = 2


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: Clone) -> None:
    """Give this process new namespaces."""
    _check(_libc.unshare(int(flags)), f"unshare {flags!r}")


def join(namespace: int, kind: Clone) -> None:
    """Move this process into the namespace that a file descriptor stands for."""
    _check(_libc.setns(namespace, int(kind)), f"setns {kind!r}")


def mount(source: str, target: str, kind: str | None, flags: Mount, options: str | None = None) -> None:
    """Mount a file system, or bind a path over another."""

    def raw(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    _check(
        _libc.mount(raw(source), raw(target), raw(kind), ctypes.c_ulong(flags), raw(options)),
        f"mount {source} on {target}",
    )


def detach(target: str) -> None:
    """Remove a mount from the file tree; it exists while something has it open."""
    _check(_libc.umount2(target.encode(), _DETACH), f"umount {target}")


def die_with_parent(signal: int) -> None:
    """Have the kernel send this process a signal when the thread that forked it ends.

    A parent that has ended before this call goes unnoticed: the caller must check for that afterwards.
    """
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Make this process the parent of its descendants that lose theirs."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl PR_SET_CHILD_SUBREAPER")


def name_thread(name: str) -> None:
    """Have tools such as `ps` and `top` show the calling thread by this name."""
    _check(_libc.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0), "prctl PR_SET_NAME")
