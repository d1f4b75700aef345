"""What a service of a parameter server is: it holds one bucket, takes messages and gives replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from tacit.contracts import Payload
from tacit.errors import PayloadError, ServerLost
from tacit.stores.messages import Message


class Sender(NamedTuple):
    """A worker in one of its lives."""

    worker: int
    incarnation: int
    """1 for its first process, and one more each time that it comes back."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one message: at once, or when a later message has come.

    Attributes:
        to: the sender of the message that it answers; `sequence` is that message's.
        payloads: the answer, in the formats of the message's `pulls`.
        refused: the reason why there is no answer; None: there is one.
        stale: for a push, the number of updates applied since its worker had pulled.
        clock: the number of the worker's pushes taken so far; None: as many as it knows.
        offer: whether the worker is to bring the parameters, as the server has none yet.
    """

    to: Sender
    sequence: int
    payloads: tuple[Payload, ...] = ()
    refused: Exception | None = None
    stale: int | None = None
    clock: int | None = None
    offer: bool = False


SavedState = Mapping[str, Any]
"""A service's state for a checkpoint: tensors, numbers, and lists and mappings of these."""
S = TypeVar("S")


class Service(ABC, Generic[S]):
    """Serves one bucket: a frozen dataclass of its settings; its state is passed in and returned.

    A message is taken as a whole or not at all: a refused one has changed nothing. The caller passes one
    message after the other, in the order of arrival, so a run is repeated by repeating that order.
    """

    enters_workers: ClassVar[bool] = True
    """Whether workers send ENTER; else each takes part from its welcome on."""

    @property
    def numel(self) -> int | None:
        """The number of entries of the bucket; None: messages have it."""
        return None

    @abstractmethod
    def start(self) -> S:
        """The state before the first message."""

    @abstractmethod
    def on(self, sender: Sender, message: Message, state: S) -> tuple[Sequence[Reply], S]:
        """Take a message.

        Args:
            state: used up by the call, as its tensors may be overwritten.

        Returns:
            The replies that are due now, perhaps to earlier messages, and the new state. What a reply's
            payloads hold is good until the next message of the worker that it is for.
        """

    @abstractmethod
    def leave(self, sender: Sender, why: str, state: S) -> tuple[Sequence[Reply], S]:
        """Go on without a worker that is gone or has left, as `on`; `why` begins with its name."""

    @abstractmethod
    def missing(self, state: S) -> set[int]:
        """The workers for which others wait."""

    @abstractmethod
    def save(self, state: S) -> SavedState:
        """A copy of what a restarted server needs."""

    @abstractmethod
    def load(self, saved: SavedState) -> S:
        """The state to go on from; workers have to enter anew, and pushes of an unfinished round are gone."""

    @abstractmethod
    def staleness(self, state: S) -> tuple[Mapping[int, int], int]:
        """How many pushes were so many updates old, and how many were dropped as they came too late."""


# ---- what a service knows of each worker --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker, as a service knows it.

    Attributes:
        incarnation: of its present or last life; 0 before the first.
        present: whether it takes part, or is still expected to begin.
        clock: the sequence number of its last push that was taken, over all of its lives.
        pulled: which version of the parameters it has.
        why: why it is not present.
    """

    incarnation: int = 0
    present: bool = True
    clock: int = 0
    pulled: int = 0
    why: str = ""

    def entered(self, incarnation: int) -> WorkerRecord:
        """The record of a worker that begins another life."""
        return replace(self, incarnation=incarnation, present=True, why="")

    def check(self, sender: Sender, sequence: int) -> None:
        """Refuse a push of another life, or out of its turn.

        Raises:
            ServerLost: the sender is not, or no longer, the worker that is at work.
            PayloadError: it is not the next one.
        """
        if not self.present or sender.incarnation != self.incarnation:
            why = f" ({self.why})" if self.why else ""
            raise ServerLost(
                f"the server goes on without this process, which was worker {sender.worker} for the "
                f"{sender.incarnation}. time{why}: attach again to come back, with fresh parameters"
            )
        if sequence != self.clock + 1:
            raise PayloadError(
                f"worker {sender.worker} has pushed step {sequence}, and its next is step "
                f"{self.clock + 1}: each is taken once, and in order"
            )


WorkerRecords = tuple[WorkerRecord, ...]


def with_record(records: WorkerRecords, worker: int, record: WorkerRecord) -> WorkerRecords:
    """The records, with the worker's replaced."""
    return (*records[:worker], record, *records[worker + 1 :])


def without_worker(records: WorkerRecords, sender: Sender, why: str) -> WorkerRecords | None:
    """The records after this life of a worker has ended; None where it was not at work."""
    record = records[sender.worker]
    if not record.present or record.incarnation != sender.incarnation:
        return None
    return with_record(records, sender.worker, replace(record, present=False, why=why))
