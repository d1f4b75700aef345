"""Barriers by the launcher's store, before a session is closed, and before its state is gathered.

They find ranks that take more steps instead of arriving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tacit.failure.bounded_store import BoundedStore

SILENT_SECONDS = 15.0
"""Seconds of silence after which a rank counts as gone or frozen while others close, if the time-out is not
shorter. A thread of each rank reports each second that it lives, so a slow rank may take any time.
"""


def silence_for(timeout: float) -> float:
    """The seconds of silence after which a rank counts as gone, for this time-out."""
    return min(SILENT_SECONDS, max(timeout, 3.0))


HINT = (
    "ranks have uneven data, or skip steps alone. Give every rank the same number of batches "
    "(DistributedSampler(..., drop_last=True)), or stop all ranks when the first has no more; where a "
    "GradScaler skips steps, write attach(..., scaler=scaler)"
)


class StepsReached(NamedTuple):
    """How far a rank is.

    Attributes:
        steps: attempts of the optimizer.
        begun: the number of collectives that it has begun. If it is one more than that of a closed rank, this
            rank waits for that one.
    """

    steps: int
    begun: int = 0


class _First(NamedTuple):
    rank: int
    reached: StepsReached
    refused: str = ""


class CloseBarrier:
    """The close barrier on one rank. The first to close writes its number of steps; all compare with it.

    So the store serves a few messages a rank and second, only while some ranks have closed and others have
    not.

    Args:
        store: seen by these ranks alone.
        rank: this rank.
        ranks: all ranks that take part.
        timeout: seconds after which a peer that does not answer is an error.
    """

    def __init__(self, store: BoundedStore, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self._silent = silence_for(timeout)
        self._store, self._rank, self._ranks = store, rank, ranks
        self._first: _First | None = None
        self._arrived = False
        self._beats = 0
        self._heard: dict[int, tuple[str, float]] = {}

    def arrive(
        self, here: StepsReached, differs: Callable[[], str | None] = lambda: None, refused: str = ""
    ) -> str | None:
        """Enter the barrier. Returns what differs between ranks, or None; only then it completes.

        `differs`: called if the steps are equal; returns what else differs, or None. `refused`: the reason
            why this rank could not take its next step.
        """
        mine = f"{self._rank} {here.steps} {here.begun} {refused}"
        self._first = _read(self._store.compare_set("closing", "", mine))
        self._arrived = True
        if self._first.reached.steps != here.steps:
            return _uneven(self._first, _First(self._rank, here, refused), "after")
        if (wrong := differs()) is not None:
            return wrong
        self._count("closed", self._store)
        return None

    def complete(self) -> bool:
        """Whether all ranks have entered."""
        return self._all("closed", self._store)

    def look(self, here: StepsReached) -> str | None:
        """Check the barrier, each second, in a thread that lives as long as training.

        Returns an error or None: a rank has closed and this one goes on, or a rank is silent.
        """
        if self._first is None:
            if not self._store.check(["closing"]):
                return None
            self._first = _read(self._store.get("closing"))
        self._beats += 1
        self._store.set(f"alive/{self._rank}", str(self._beats))
        if self._arrived:
            return None if self.complete() else self._missed()
        if here > self._first.reached:
            now = StepsReached(max(here.steps, self._first.reached.steps + 1))
            return _uneven(self._first, _First(self._rank, now), "is at")
        return None

    def left_behind(self, alarm: str) -> str | None:
        """What differs, if a rank had closed and a round failed for no other known reason; or None.

        A rank that goes on may wait for the closed one in a collective of another library, and so have begun
        no more of tacit's: DDP broadcasts buffers from rank 0 in each forward, for example.
        """
        if not self._store.check(["closing"]):
            return None
        first = _read(self._store.get("closing"))
        who = alarm.partition(": ")[0]
        if who == f"rank {first.rank}":
            return None
        return (
            f"{UNEVEN}rank {first.rank} closed its session after {first.reached.steps} steps, and {who} did "
            f"not follow but failed: {first.refused or HINT} ({alarm})"
        )

    def leave(self, seconds: float) -> None:
        """Leave the barrier; rank 0, whose process may hold the store, last. It waits at most `seconds`."""
        store = self._store.within(seconds)
        self._count("parted", store)
        deadline = time.monotonic() + seconds
        while self._rank == 0 and not self._all("parted", store) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _missed(self) -> str | None:
        """An error that names a silent rank, or None: the first to close and the others watch each other."""
        assert self._first is not None
        others = self._ranks if self._first.rank == self._rank else [self._first.rank]
        now = time.monotonic()
        for rank in others:
            key = f"alive/{rank}"
            beat = self._store.get(key).decode() if self._store.check([key]) else ""
            if self._heard.setdefault(rank, (beat, now))[0] != beat:
                self._heard[rank] = (beat, now)
            if now - self._heard[rank][1] > self._silent:
                self._store.set(f"silent/{rank}", "")  # without waiting for its answer
                return f"nothing was heard of rank {rank} for {self._silent:g} s while sessions were closed"
        return None

    def _count(self, what: str, store: BoundedStore) -> None:
        if store.add(what, 1) == len(self._ranks):
            store.set(f"all {what}", "")

    def _all(self, what: str, store: BoundedStore) -> bool:
        return store.check([f"all {what}"])


_WHY = {
    "session.state_dict()": "here ranks divide their state, and join it in this call. Call it on every rank, "
    "after the same step, and have one of them save what it returns",
    "session.load_state_dict()": "in this call all ranks go on from one moment, or none does. Call it on "
    "every rank, with what that rank has saved, before the same step",
    "session.discard()": "in this call ranks agree whether they take a step back. Call it on every rank, in "
    "each step in which one may wish it, with wish=False on the others",
    "session.sync()": "in this call all replicas become equal. Call it on every rank, after the same step",
}
"""(collective call of the session) -> why all ranks must make it, and what to write."""
_COUNT = 20
"""Bits of the number of ranks."""


class CallBarrier:
    """The barrier of collective calls during training, on one rank; one call after another.

    Args:
        store: seen by these ranks alone.
        rank: this rank, one of so many `peers`.
    """

    def __init__(self, store: BoundedStore, rank: int, peers: int) -> None:
        self._store, self._rank, self._peers = store, rank, peers
        self._come = 0
        self._before = [0, 0]
        """The last values of the two counters in the store, which calls use in turn."""

    def arrive(self, number: int) -> None:
        """Arrive at a call, and send a number to the others."""
        self._come += 1
        self._store.add(f"come/{self._come % 2}", 1 + (number << _COUNT))

    def complete(self) -> int | None:
        """The sum of all ranks' numbers; None: not all have arrived."""
        turn = self._come % 2
        now = self._store.add(f"come/{turn}", 0)
        found = now - self._before[turn]
        if found % (1 << _COUNT) < self._peers:
            return None
        self._before[turn] = now
        return found >> _COUNT

    def announce(self, here: StepsReached, call: str) -> None:
        """Report that this rank waits in a call, such as "session.state_dict()"."""
        self._store.compare_set(f"call/{self._come}", "", f"{self._rank} {here.steps} {here.begun} {call}")

    def look(self, here: StepsReached, closes: bool) -> str | None:
        """An error or None: another rank waits in a call, and this one has gone on, or `closes`."""
        key = f"call/{self._come + 1}"
        if not self._store.check([key]):
            return None
        rank, steps, begun, call = self._store.get(key).decode().split(" ", 3)
        if not closes and here <= StepsReached(int(steps), int(begun)):
            return None
        return (
            f"rank {rank} waits in {call} after {steps} steps, and rank {self._rank} has gone on without it: "
            f"{_WHY[call]}"
        )


UNEVEN = "uneven: "
"""The prefix of a text that is a whole error."""


def _read(text: bytes) -> _First:
    rank, steps, begun, refused = text.decode().split(" ", 3)
    return _First(int(rank), StepsReached(int(steps), int(begun)), refused)


def _uneven(one: _First, other: _First, how: str) -> str:
    short, long = sorted((one, other), key=lambda each: each.reached.steps)
    there = f"after {long.reached.steps}" if how == "after" else f"is at step {long.reached.steps}"
    return (
        f"{UNEVEN}rank {short.rank} closed its session after {short.reached.steps} steps, rank {long.rank} "
        f"{there}: {short.refused or HINT}"
    )
