"""Sessions that nobody closes are closed when torch.distributed is shut down, or else when the program ends.

`destroy_process_group` calls `shutdown` of every process group. One of them is ours, and carries nothing: so
torch tells us, while the other groups still work.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

BACKEND = "tacit"


class Endable(Protocol):
    """A session at work."""

    def end(self, where: str, error: BaseException | None) -> None:
        """Close it, as nobody has; where an `error` ends the program, without the others. Never raises."""


_OPEN: list[Endable] = []
_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}
_PROCESS = os.getpid()
"""A process that this one forks inherits all of this, and ends nothing."""


class _Notice(dist.ProcessGroup):
    """A process group without collectives: that it is shut down is all it is for."""

    supports_splitting = False

    def getBackendName(self) -> str:
        """As it was registered."""
        return BACKEND

    def _get_backend(self, device: Any) -> Any:
        """Itself, which torch asks whether it can be split where the world is bound to a GPU."""
        return self

    def shutdown(self) -> None:
        """Torch.distributed is about to be shut down."""
        _end_all("destroy_process_group", sys.exc_info()[1])


def watch(ranks: list[int]) -> None:
    """Have these ranks be told when torch.distributed is shut down. A collective call, of all of them."""
    global _PROCESS
    _PROCESS = os.getpid()
    if not _GROUPS:
        atexit.register(_at_exit)  # not at import: what is registered later runs earlier, before groups end
    key = tuple(ranks)
    if _GROUPS.get(key) in dist.distributed_c10d._world.pg_map:
        return
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _notice, devices=["cpu"])
    whole = len(ranks) == dist.get_world_size()
    group = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=not whole)
    assert isinstance(group, dist.ProcessGroup)
    _GROUPS[key] = group


def _notice(store: Any, rank: int, size: int, timeout: timedelta) -> _Notice:
    return _Notice(rank, size)  # type: ignore[call-arg]


def began(session: Endable) -> None:
    """Remember a session, to end it if nobody else does."""
    _OPEN.append(session)


def ended(session: Endable) -> None:
    """It is closed."""
    if session in _OPEN:
        _OPEN.remove(session)


def _end_all(where: str, error: BaseException | None) -> None:
    if isinstance(error, SystemExit) and not error.code:
        error = None
    for session in [*_OPEN] if os.getpid() == _PROCESS else []:
        session.end(where, error)


def _at_exit() -> None:
    # `last_value` is what nobody has caught, which Python has just printed.
    _end_all("the end of the program", getattr(sys, "last_value", None))
