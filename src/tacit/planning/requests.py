"""Requests of a launcher to a session: an environment variable with a file's name, or options as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeVar

from tacit.described import JSON, read
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.links import Links

R = TypeVar("R")


class TimedSession(Protocol):
    """The session whose steps are timed.

    Attributes:
        links: the measured links; None: they were not measured.
    """

    links: Links | None

    @property
    def options(self) -> AttachSpec:
        """The strategy at work, the model and the optimizers."""

    @property
    def levels(self) -> Sequence[Level]:
        """The levels of the strategy at work."""

    @property
    def closed(self) -> bool:
        """Whether the session has ended."""

    def flush(self) -> None:
        """Wait until nothing is under way."""


def requested(variable: str, kind: Callable[[str], R]) -> R | None:
    """The request in an environment variable: an object of `kind`, from a file's name or from JSON."""
    text = os.environ.get(variable, "")
    if text.startswith("{"):
        found: R = read(text, Annotated[kind, JSON], variable)
        return found
    return kind(text) if text else None
