"""The services of a server, one for each bucket, and who waits for their replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tacit.errors import AttachError, PayloadError
from tacit.stores.messages import Message, MessageSpec, RunSpec
from tacit.stores.protocol import FrameKind, Header
from tacit.stores.server.averaging_service import AveragingService
from tacit.stores.server.connection import Arrival, Connection
from tacit.stores.server.counters import ServerCounters
from tacit.stores.server.limits import parameter_of
from tacit.stores.server.optimizers import ServerDelayedNesterov, optimizer_from
from tacit.stores.server.parameter_service import ParameterService
from tacit.stores.service import Reply, SavedState, Sender, Service
from tacit.topologies.star import Asynchronous, Star


@dataclass
class WaitingReply:
    """A message that was taken and not answered.

    Attributes:
        since: when it was taken.
        reminded: when its worker was last told to wait.
        queued: seconds that it waited for its turn.
    """

    header: Header
    since: float
    reminded: float
    queued: float

    def remind(self, now: float) -> Header:
        """The header of the frame that tells its worker to wait."""
        self.reminded = now
        return self.header._replace(kind=FrameKind.WAIT)


class BucketService:
    """One bucket: its service, the state of that, and the messages that wait for a reply.

    Args:
        service: of which kind.
        saved: the state to go on from; None: begin.

    Attributes:
        waiting: by the sender and the sequence number of the message.
    """

    def __init__(self, service: Service[Any], saved: SavedState | None) -> None:
        self.service = service
        self.state: Any = service.start() if saved is None else service.load(saved)
        self.waiting: dict[tuple[Sender, int], WaitingReply] = {}

    def give(self, sender: Sender, message: Message) -> Iterable[Reply]:
        """Give the service a message; the replies that are due now."""
        replies, self.state = self.service.on(sender, message, self.state)
        return replies

    def leave(self, sender: Sender, why: str) -> Iterable[Reply]:
        """Notify the service that a worker is gone. Returns the replies that are due now."""
        replies, self.state = self.service.leave(sender, why, self.state)
        return replies

    def missing(self) -> set[int]:
        """The workers for which others wait."""
        return self.service.missing(self.state)

    def clock(self, worker: int) -> int:
        """How many pushes of a worker were taken."""
        clock: int = self.state.records[worker].clock
        return clock

    def incarnation(self, worker: int) -> int:
        """Of the worker's present or last life."""
        incarnation: int = self.state.records[worker].incarnation
        return incarnation


class BucketServices:
    """All buckets of a server.

    Args:
        workers: how many there are.
        saved: of each bucket of the checkpoint, by its key, what its service has saved.
        counters: count the time that services take.
        deliver: gets each reply, and the bucket that it is of.
    """

    def __init__(
        self,
        workers: int,
        saved: Mapping[str, SavedState],
        counters: ServerCounters,
        deliver: Callable[[BucketService, Reply], None],
    ) -> None:
        self._workers, self._saved, self._counters, self._deliver = workers, saved, counters, deliver
        self._buckets: dict[str, BucketService] = {}

    def __iter__(self) -> Iterator[BucketService]:
        """The buckets that workers have begun with."""
        return iter(self._buckets.values())

    def open(self, connection: Connection, number: int, run: RunSpec, here: Iterable[Sender]) -> None:
        """Begin with the bucket of a declared message, if it is new; `here`: the workers that are there."""
        spec, star = connection.declared[number].spec, run.star
        ours = self._numel(spec.key)
        if spec.back is not None and ours not in (None, spec.back.numel):
            error = AttachError(
                f"{connection.name} has {spec.back.numel} entries in the bucket of {spec.key}, and the "
                f"server {ours}: give all workers the same bucket_cap_mb, also where the server has a "
                "--checkpoint"
            )
            connection.reject(number, error)
            return
        if spec.key in self._buckets or not (star.averages or spec.back):
            return
        service = service_for(run, self._workers, spec)
        bucket = self._buckets[spec.key] = BucketService(service, self._saved.get(spec.key))
        for sender in () if service.enters_workers else here:
            self._give(bucket, sender, Message(FrameKind.ENTER))

    def _numel(self, key: str) -> int | None:
        """How many parameters a bucket has; None where none are known."""
        if key in self._buckets:
            return self._buckets[key].service.numel
        saved = self._saved.get(key, {})
        return saved["x"].numel() if "x" in saved else None

    def take(self, arrival: Arrival) -> None:
        """Give a frame to the service of its bucket.

        Raises:
            TacitError: the message cannot be read, or is about a bucket with which nobody has begun.
        """
        connection, header = arrival.connection, arrival.header
        if header.spec in connection.refused:
            raise connection.refused[header.spec]
        declared = connection.declared[header.spec]
        key = declared.spec.key
        if key not in self._buckets:
            raise PayloadError(f"{connection.name} sent a message about {key}, with which it has not begun")
        bucket, message = self._buckets[key], declared.message(header, arrival.body)
        now = time.monotonic()
        waiting = WaitingReply(header, now, now, now - arrival.at)
        bucket.waiting[connection.sender, message.sequence] = waiting
        self._give(bucket, connection.sender, message)

    def enter(self, sender: Sender) -> None:
        """Let a welcome worker take part in buckets that need no ENTER."""
        for bucket in self._buckets.values():
            if not bucket.service.enters_workers:
                self._give(bucket, sender, Message(FrameKind.ENTER))

    def leave(self, sender: Sender, why: str) -> None:
        """Go on without a worker."""
        for bucket in self._buckets.values():
            self._give(bucket, sender, why)

    def _give(self, bucket: BucketService, sender: Sender, message: Message | str) -> None:
        """Pass a service a message, or the reason why a worker is gone; deliver its replies."""
        began = time.monotonic()
        for reply in (
            bucket.leave(sender, message) if isinstance(message, str) else bucket.give(sender, message)
        ):
            self._deliver(bucket, reply)
        self._counters.worked(time.monotonic() - began)

    # ---- what they know -------------------------------------------------------------------------------

    def clocks(self, worker: int) -> dict[str, int]:
        """For each bucket that is known, how many pushes of the worker were taken."""
        saved = {key: each["number"] for key, each in self._saved.items() if "number" in each}
        return saved | {key: bucket.clock(worker) for key, bucket in self._buckets.items()}

    def staleness(self) -> tuple[dict[int, int], int]:
        """How many pushes were so many updates old, and how many were dropped as late."""
        stale: dict[int, int] = {}
        late = 0
        for bucket in self._buckets.values():
            ages, dropped = bucket.service.staleness(bucket.state)
            late += dropped
            for age, count in ages.items():
                stale[age] = stale.get(age, 0) + count
        return stale, late

    def save(self) -> dict[str, SavedState]:
        """What all services save; of buckets with which nobody has begun yet, what was saved before."""
        now = {key: bucket.service.save(bucket.state) for key, bucket in self._buckets.items()}
        return {**self._saved, **now}


def service_for(run: RunSpec, workers: int, spec: MessageSpec) -> Service[Any]:
    """The service of a bucket, as the first worker with it has declared it.

    If the server steps, tensors that no optimizer moves are moved by the workers: each pushes its change,
    without waiting.
    """
    star = run.star
    if star.averages:
        return AveragingService(workers, spec.key)
    assert spec.back is not None
    if star.outer is not None:
        outer, delay = star.outer, star.outer.delay or workers
        steps = ServerDelayedNesterov(outer.lr, outer.momentum, delay, workers / delay)
        return ParameterService(workers, star, spec.back, steps, spec.key)
    if not run.optimizers:
        return ParameterService(workers, star, spec.back, None, spec.key)
    optimizers = {name: optimizer for name, *_, optimizer in run.model}
    index = optimizers[parameter_of(spec.key, frozenset(optimizers)) or ""]
    if index is None:
        return ParameterService(workers, Star(Asynchronous()), spec.back, None, spec.key)
    return ParameterService(workers, star, spec.back, optimizer_from(run.optimizers[index]), spec.key)
