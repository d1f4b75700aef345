"""The costs of rounds: bytes, seconds, and for how many of these training waited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tacit.timelines import Span

KEPT = 1000
"""The number of last rounds and steps that are recorded one by one."""


@dataclass(frozen=True)
class RoundRecord:
    """The costs of one round on this rank.

    Attributes:
        bytes_out: sent by this rank, by the formulas of the collectives.
        seconds: from the first bucket's start until the last one was complete.
        exposed_seconds: of these, how long the training waited.
        apart_seconds: seconds since the round before; None for the first.
        skipped: whether a gradient was not finite, so that the states of the round were dropped.
        span: when it began and ended, as `time.perf_counter` has it.
        waits: when training waited for it.
    """

    round: int
    step: int
    bytes_out: int
    seconds: float
    exposed_seconds: float
    apart_seconds: float | None
    skipped: bool = False
    span: Span = Span(0.0, 0.0)
    waits: tuple[Span, ...] = ()


@dataclass
class Totals:
    """Sums over all rounds of a session."""

    rounds: int = 0
    skipped_rounds: int = 0
    bytes_out: int = 0
    closing_bytes_out: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    apart_seconds: float = 0.0
    exposed_when_apart: float = 0.0
    applied: int = 0
    lag: int = 0

    def add(self, record: RoundRecord, closing: bool) -> None:
        """Add a round. `closing`: whether its bytes are sent by closing the session."""
        self.send(record.bytes_out, closing)
        self.rounds += 1
        self.skipped_rounds += record.skipped
        self.seconds += record.seconds
        self.exposed_seconds += record.exposed_seconds
        if record.apart_seconds is not None:
            self.apart_seconds += record.apart_seconds
            self.exposed_when_apart += record.exposed_seconds

    def void(self, rounds: int) -> None:
        """Count rounds that were added and then taken back."""
        self.skipped_rounds += rounds

    def send(self, bytes_out: int, closing: bool) -> None:
        """Add bytes that this rank has sent."""
        if closing:
            self.closing_bytes_out += bytes_out
        else:
            self.bytes_out += bytes_out

    def apply(self, lag: int) -> None:
        """Note that an answer was applied, `lag` steps after the start of its round."""
        self.applied += 1
        self.lag += lag


@dataclass(eq=False, kw_only=True)
class RoundTimer:
    """Measures the time of one round.

    Attributes:
        begun: when its first exchange was under way.
    """

    begun: float | None = None
    _waits: tuple[tuple[Span, ...], float | None] = ((), None)  # one assignment: two threads read it

    def begin(self) -> None:
        """Note that an exchange of the round is under way."""
        if self.begun is None:
            self.begun = time.perf_counter()

    def wait(self) -> bool:
        """Note that training waits for it from now on. Returns whether it did not before."""
        before, since = self._waits
        if since is None:
            self._waits = before, time.perf_counter()
        return since is None

    def go_on(self) -> None:
        """Note that training no longer waits for it."""
        self._waits = self.waits(time.perf_counter()), None

    def waits(self, now: float) -> tuple[Span, ...]:
        """The spans in which training has waited for it, up to now."""
        before, since = self._waits
        return before if since is None else (*before, Span(since, now))


class CommStats:
    """Adds up the costs of rounds.

    Attributes:
        records: the last thousand rounds.
        steps: (number of steps taken, time by `time.perf_counter`) of the last thousand steps.
        closing: whether bytes are now sent by closing the session, and not by training.
    """

    def __init__(self) -> None:
        self.records: deque[RoundRecord] = deque(maxlen=KEPT)
        self.steps: deque[tuple[int, float]] = deque([(0, time.perf_counter())], maxlen=KEPT + 1)
        self.totals = Totals()
        self.closing = False
        self._before = 0
        self._last_end: float | None = None

    def begin_closing(self) -> None:
        """Count all bytes from now on as sent by closing the session."""
        self.closing = True

    def stepped(self, steps: int) -> None:
        """Note that this number of steps has been taken now."""
        self.steps.append((steps, time.perf_counter()))

    def ended(
        self,
        watch: RoundTimer,
        round: int,
        step: int,
        bytes_out: int,
        skipped: bool,
        measured: tuple[float, float] | None = None,
    ) -> float:
        """Record a round whose buckets are all complete. Returns the seconds that it took.

        `measured`: these seconds, and those that training waited, if a device has measured them.
        """
        now = time.perf_counter()
        begun = now if watch.begun is None else watch.begun
        waits = watch.waits(now)
        if measured is not None:
            took, waited = measured
            now = begun + took
            waits = (Span(now - waited, now),) if waited else ()
        exposed = 0.0
        for since, until in waits:
            exposed += until - since
        record = RoundRecord(
            round=round,
            step=step,
            bytes_out=bytes_out,
            seconds=now - begun,
            exposed_seconds=exposed,
            apart_seconds=now - self._last_end if self._last_end is not None else None,
            skipped=skipped,
            span=Span(begun, now),
            waits=waits,
        )
        self._last_end = now
        self.records.append(record)
        self.totals.add(record, self.closing)
        return record.seconds

    def sent(self, bytes_out: int) -> None:
        """Add bytes that this rank has sent."""
        self.totals.send(bytes_out, self.closing)

    def resumed(self, steps: int) -> None:
        """Note the number of steps before the checkpoint, whose bytes are not counted here."""
        self._before += steps

    def metrics(self, steps: int, dense_bytes: float) -> dict[str, float]:
        """The numbers of `Session.metrics`.

        `dense_bytes`: the bytes that DDP's all-reduce would send from a rank in one step.
        """
        totals = self.totals
        share = totals.exposed_when_apart / totals.apart_seconds if totals.apart_seconds else 0.0
        dense = dense_bytes * (steps - self._before)
        return {
            "steps": steps,
            "rounds": totals.rounds,
            "void_rounds": totals.skipped_rounds,
            "bytes_out": totals.bytes_out,
            "closing_bytes_out": totals.closing_bytes_out,
            "ddp_bytes_out": dense,
            "exchange_seconds": totals.seconds,
            "exposed_seconds": totals.exposed_seconds,
            "compute_share": 1.0 - share,
            "compression": _ratio(dense, totals.bytes_out),
            "lag": totals.lag / totals.applied if totals.applied else 0.0,
        }


_SUMS = ("rounds", "void_rounds", "bytes_out", "closing_bytes_out", "exchange_seconds", "exposed_seconds")


def _ratio(dense: float, sent: float) -> float:
    """How many times fewer bytes were sent; 1 where tacit has sent nothing, as with DDP as it is."""
    return dense / sent if dense and sent else 1.0


def joined(levels: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several levels as one: sums, and the rounds and bytes of each level.

    `compression` is that of all levels together, `lag` that of the farthest.
    """
    total: dict[str, float] = {key: levels[-1][key] for key in ("steps", "ddp_bytes_out")}
    for key in _SUMS:
        total[key] = sum(level[key] for level in levels)
    total["compression"] = _ratio(total["ddp_bytes_out"], total["bytes_out"])
    total["lag"] = levels[-1]["lag"]
    total["compute_share"] = max(0.0, 1.0 - sum(1.0 - level["compute_share"] for level in levels))
    for i, level in enumerate(levels):
        total |= {f"{key}_{i}": level[key] for key in ("rounds", "bytes_out")}
    return total


_COUNTED = ("steps", "ddp_bytes_out", *_SUMS)


def in_turn(ended: Sequence[Mapping[str, float]], now: Mapping[str, float]) -> dict[str, float]:
    """The metrics of strategies that were at work in turn: sums, and all else from `now`, the last one's."""
    total = dict(now)
    for each in ended:
        for key in _COUNTED:
            total[key] += each[key]
    total["compression"] = _ratio(total["ddp_bytes_out"], total["bytes_out"])
    return total
