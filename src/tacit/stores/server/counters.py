"""What a server counts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tacit.environment import INTERFACE
from tacit.errors import ConfigError
from tacit.stores.protocol import FrameKind, Header
from tacit.transports.network_interfaces import sent_bytes


@dataclass
class ServerCounters:
    """Sums since the server's start.

    Attributes:
        pushes: messages that were pushed, whole; `pushed`, their bytes.
        pulls: answers that were sent; `pulled`, their bytes.
        queued: seconds that messages waited for their turn, once they had come.
        busy: seconds spent on messages.
    """

    pushes: int = 0
    pushed: int = 0
    pulls: int = 0
    pulled: int = 0
    queued: float = 0.0
    busy: float = 0.0

    def arrived(self, header: Header, queued: float) -> None:
        """Count a message that gets its turn."""
        self.queued += queued
        if header.kind == FrameKind.PUSH:
            self.pushes += 1
            self.pushed += header.nbytes

    def answered(self, nbytes: int) -> None:
        """Count an answer that leaves."""
        self.pulls += 1
        self.pulled += nbytes

    def worked(self, seconds: float) -> None:
        """Count time spent on a message."""
        self.busy += seconds

    def stats(self) -> dict[str, Any]:
        """All of them, and what the interface of TACIT_INTERFACE has sent; None where none is named."""
        interface = os.environ.get(INTERFACE)
        return {
            "pushes": self.pushes,
            "push_bytes": self.pushed,
            "pulls": self.pulls,
            "pull_bytes": self.pulled,
            "queue_seconds": self.queued,
            "busy_seconds": self.busy,
            "transmitted": transmitted_bytes(interface) if interface else None,
        }


def transmitted_bytes(interface: str) -> int:
    """Bytes that a network interface of this process's namespace has sent since it was made.

    Raises:
        ConfigError: there is no such interface.
    """
    values = sent_bytes()
    if interface not in values:
        raise ConfigError(
            f"this process sees no network interface {interface!r}, only {', '.join(values)}: unset "
            "TACIT_INTERFACE, or let it name one of these"
        )
    return values[interface]
