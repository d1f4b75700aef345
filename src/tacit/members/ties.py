"""Connections between members that carry nothing: where a process ends, its kernel closes them at once."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Mapping

CONNECT = 1.0
"""Seconds in which another member's machine has to answer."""


class Ties:
    """This member's connections to those that it watches, and theirs to it.

    Frozen processes and cut lines keep a connection, and forked children of a dead process do so for as long
    as they live: these are found by silence.

    Args:
        reached: host and port of the store: members connect to this machine's address on the way there.
    """

    def __init__(self, reached: tuple[str, int]) -> None:
        with socket.create_connection(reached, CONNECT) as way:
            host = way.getsockname()[0]
            family = way.family
        self._listener = socket.socket(family)
        self._listener.bind((host, 0))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """Where others connect to."""
        self._theirs: list[socket.socket] = []
        self._mine: dict[str, socket.socket | None] = {}

    def broken(self, watched: Mapping[str, tuple[str, int]]) -> list[str]:
        """Of the members to watch, by id with their addresses: those whose process has ended."""
        with contextlib.suppress(OSError):
            while True:
                self._theirs.append(self._listener.accept()[0])
        for id in [id for id in self._mine if id not in watched]:
            self._drop(id)
        for id in [id for id in watched if id not in self._mine]:
            try:
                self._mine[id] = socket.create_connection(watched[id], CONNECT)
            except OSError:
                self._mine[id] = None  # nobody listens, or a firewall forbids it: silence tells
        open_ = {each: id for id, each in self._mine.items() if each is not None}
        readable = select.select([*open_], [], [], 0)[0] if open_ else []
        return [open_[each] for each in readable]  # nothing is ever sent: it is the end

    def close(self) -> None:
        """Close all."""
        for id in [*self._mine]:
            self._drop(id)
        for each in (*self._theirs, self._listener):
            each.close()

    def _drop(self, id: str) -> None:
        tie = self._mine.pop(id)
        if tie is not None:
            tie.close()
