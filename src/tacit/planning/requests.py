"""What a launcher asks of a session: an environment variable names a file, or says as JSON what is wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

from tacit.described import JSON, read
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.links import Links

__all__ = ["TimedSession", "requested"]

R = TypeVar("R")


class TimedSession(Protocol):
    """The session whose steps are timed.

    Attributes:
        links: what the links carry, where they were measured before.
    """

    links: Links | None

    @property
    def options(self) -> AttachSpec:
        """What is at work, and on what."""

    @property
    def levels(self) -> Sequence[Level]:
        """The levels of the strategy at work."""

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""

    def flush(self) -> None:
        """Wait until nothing is under way."""


def requested(variable: str, kind: Callable[[str], R]) -> R | None:
    """The request in an environment variable, of a class that has a file alone, or more as JSON says."""
    text = os.environ.get(variable, "")
    if text.startswith("{"):
        found: R = read(text, Annotated[kind, JSON], variable)
        return found
    return kind(text) if text else None
