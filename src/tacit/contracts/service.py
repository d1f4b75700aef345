"""The passive side where there is no lockstep: parameter servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tacit.contracts.common import Payload


class Sender(NamedTuple):
    """One life of a worker."""

    worker: int
    incarnation: int
    """1 for its first process, and one more each time that it comes back."""


@dataclass(frozen=True, slots=True)
class Message:
    """What a service is sent.

    Attributes:
        sequence: counts a worker's messages of this kind of content from 1, over all of its lives.
        content: what the service understands.
    """

    sequence: int
    content: object


@dataclass(frozen=True, slots=True)
class Reply:
    """What a service answers: to one message, at once or when a later one has come.

    Attributes:
        to: whose message it answers; `sequence` is that message's.
        payloads: the answer.
        refused: why there is none; None where there is one.
        facts: numbers that go along.
    """

    to: Sender
    sequence: int
    payloads: tuple[Payload, ...] = ()
    refused: Exception | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


S = TypeVar("S")


class Service(ABC, Generic[S]):
    """The passive side where there is no lockstep: a frozen dataclass of what it does, with no state inside.

    Atomic per message: a message that is refused has changed nothing. Whoever calls takes one message after
    the other, in whatever order they come; so a run is repeated by repeating its order of messages.
    """

    @abstractmethod
    def start(self) -> S:
        """The state before the first message."""

    @abstractmethod
    def on(self, sender: Sender, message: Message, state: S) -> tuple[Sequence[Reply], S]:
        """Take one message: the replies that are due now, perhaps to earlier messages, and the new state.

        The tensors in `state` may be overwritten, so a state is used once. What a reply's payloads hold is
        good until the next message of the one that it is for.
        """
