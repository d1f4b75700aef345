"""Rounds from their start until all of their exchanges are complete, when their states are committed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tacit.contracts import Outcome
from tacit.session.buckets import Bucket
from tacit.session.health.device_notes import DeviceReport, mark
from tacit.session.health.failure import SessionFailure
from tacit.session.learning_rates import Rescaling
from tacit.session.round_costs import CommStats, RoundTimer

Commit: TypeAlias = Callable[[Mapping[int, Outcome], Set[str]], None]


@dataclass(eq=False)
class PendingRound(RoundTimer):
    """One round of some buckets, from its start until all of their exchanges are complete.

    Attributes:
        step: the step that was under way when it began.
        context: what the `Context` of its exchanges says of when they take place: "step", "round", "lr",
            "round_index".
        diverged_in_node: whether the tensors of the ranks of a node may differ.
        rates: the new learning rates of the parameters whose residual it rescales.
        outcomes: the outcomes of the buckets that are complete.
        begun_buckets: how many of its buckets are submitted.
        beside: how many of its exchanges of something else than buckets have not ended.
        sent: the bytes that this rank has sent in it, by the collectives' formulas.
        skipped: whether its states are dropped, as a scaled gradient was not finite.
        seconds: how long it took, once it is complete.
        idle: the parameters that had no gradient on any rank.
        complete: whether all of its exchanges have ended.
        ended: whether its states are committed, as it is complete and all that began before it are.
        over: set when it has ended, or has failed.
        began: in stream order, an event on the device that marks its start.
        device_report: in stream order, the device's notes, which are read when the device has run the round.
    """

    buckets: tuple[int, ...]
    step: int
    context: Mapping[str, Any]
    diverged_in_node: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    begun_buckets: int = 0
    beside: int = 0
    sent: int = 0
    skipped: bool = False
    seconds: float = 0.0
    idle: set[str] = field(default_factory=set)
    over: threading.Event = field(default_factory=threading.Event)
    complete: bool = False
    ended: bool = False
    began: Any = None
    device_report: DeviceReport | None = None

    def submitted(self, device: torch.device | None = None) -> None:
        """Note that one of its exchanges is submitted. `device`: that of exchanges in stream order."""
        if self.begun is None:
            self.begun = time.perf_counter()
        if device is not None and self.began is None:
            self.began = mark(device)

    def bucket_submitted(self) -> bool:
        """Note that one of its buckets is submitted; whether that was the last one."""
        self.begun_buckets += 1
        return self.begun_buckets == len(self.buckets)

    def submitted_beside(self) -> None:
        """Note that an exchange of something else than a bucket is submitted."""
        self.beside += 1
        self.submitted()

    def completed_beside(self, sent: int) -> None:
        """Note that an exchange of something else than a bucket has ended, and has sent so many bytes."""
        self.sent += sent
        self.beside -= 1

    def note_sent(self, sent: int) -> None:
        """Count the bytes that one of its exchanges has sent."""
        self.sent += sent

    def skip(self) -> None:
        """Drop the states that it leads to."""
        self.skipped = True

    def note_idle(self, bucket: Bucket, shares: Tensor, ranks: int) -> None:
        """Note which parameters were idle on all ranks. `shares`: the share of ranks, by parameter."""
        for param, share in zip(bucket.slices, shares.tolist(), strict=False):
            if share > 1 - 0.5 / ranks:  # a mean of ones, up to rounding
                self.idle.add(param.name)

    def waits_on(self, device: torch.device) -> None:
        """Note that training waits for it from now on, on the device too."""
        if self.wait() and self.device_report is not None:
            self.device_report.waits(mark(device))

    def end(self) -> bool:
        """Whether all of its exchanges have ended. True only once: for the first caller."""
        if self.complete or len(self.outcomes) < len(self.buckets) or self.beside:
            return False
        self.complete = True
        return True

    def committed(self) -> None:
        """Note that its states are committed."""
        self.ended = True
        self.over.set()

    def report_from(self, report: DeviceReport) -> None:
        """Read errors of this round from this report."""
        self.device_report = report

    def took(self, seconds: float) -> None:
        """Note that it is over, and how many seconds it took."""
        self.seconds = seconds


class PendingRounds:
    """The rounds of a session that are under way; their states are committed when they are complete.

    Args:
        failure: holds the session's error.
        stats: adds up what rounds cost.
        rescaling: rescales residuals, where they follow the learning rate.

    Attributes:
        by_bucket: index of a bucket -> the round in which it is under way.
        begun: how many rounds have begun.
        finished: how many rounds are over.
        skipped: whether the last round was skipped: it was complete, and its states were dropped.
    """

    def __init__(self, failure: SessionFailure, stats: CommStats, rescaling: Rescaling | None) -> None:
        self._failure, self._stats, self._rescaling = failure, stats, rescaling
        self.by_bucket: dict[int, PendingRound] = {}
        self._order: deque[PendingRound] = deque()
        self._ending = threading.Lock()
        self.begun = self.finished = 0
        self.skipped = False
        self._first_of_step = -1, 0

    def follow_buckets(self, commit: Commit, take_back: Callable[[], None]) -> None:
        """Commit to other buckets from now on: by `StateStore.commit` and `take_back`."""
        self._commit, self._take_back = commit, take_back

    def add(self, pending: PendingRound) -> None:
        """Note that a round begins."""
        if self._first_of_step[0] != pending.step:
            self._first_of_step = pending.step, self.begun
        self.begun += 1
        self._order.append(pending)
        for i in pending.buckets:
            self.by_bucket[i] = pending

    def complete(self, i: int, outcome: Outcome) -> None:
        """Note that the exchange of bucket `i` is complete; the last one ends the round."""
        pending = self.by_bucket[i]
        pending.outcomes[i] = outcome
        if len(pending.outcomes) == len(pending.buckets):
            self.end(pending)

    def end(self, pending: PendingRound) -> None:
        """End the round, if all of its exchanges have ended."""
        with self._ending:  # two lanes may end the last two exchanges of a round at once
            if not pending.end():
                return
            for each in pending.buckets:
                del self.by_bucket[each]
            while self._order and self._order[0].complete:  # so n rounds are the same ones on all ranks
                first = self._order.popleft()
                self._ended(first)
                first.committed()

    def _ended(self, pending: PendingRound, seconds: tuple[float, float] | None = None) -> None:
        """Commit the states of a round, unless it is skipped. `seconds`: as measured on the device."""
        self.skipped = pending.skipped
        if not self.skipped:
            self._commit(pending.outcomes, pending.idle)
            if self._rescaling is not None and pending.rates:
                self._rescaling.commit(pending.rates, pending.idle)
        pending.took(
            self._stats.ended(pending, self.finished, pending.step, pending.sent, self.skipped, seconds)
        )
        self.finished += 1

    def wait(self, pending: PendingRound) -> None:
        """Wait until all exchanges of this round are complete.

        Raises:
            RoundError: it failed, or an earlier one did.
        """
        pending.wait()
        pending.over.wait()
        if self._failure.error is not None:
            self._failure.raise_first()

    def wait_from_now(self) -> None:
        """Note that training waits from now on for the rounds under way; until then they were hidden."""
        for pending in set(self.by_bucket.values()):
            pending.wait()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """A block during which training waits for the rounds under way."""
        waited_for = [pending for pending in set(self.by_bucket.values()) if pending.wait()]
        try:
            yield
        finally:
            for pending in waited_for:
                pending.go_on()

    def verify(self, buckets: Collection[int] | None = None) -> None:
        """In stream order: commit the rounds for which the device has noted no error.

        Waits until the device has run the rounds of these buckets, by default of all. To be
        called before anything of their answers is applied for good.

        Raises:
            NonFinite: a rank's tensor holds NaN or infinity, and there is no GradScaler.
            Overflow: finite entries became too large on the way.
        """

    def check(self) -> None:
        """As `verify` of all rounds, but commits nothing yet: for a caller that has kernels to launch first.

        Raises:
            NonFinite, Overflow: as `verify`.
        """

    @property
    def broken(self) -> Tensor | None:
        """Whether the last round will be skipped, as a tensor on the device; None if there is no round."""
        return None

    def begin_anew(self) -> None:
        """Commit the rounds that have ended (`verify`), and forget the results of an unfinished one."""
        self.by_bucket.clear()
        self._order.clear()
        self.begun = self.finished

    def take_back(self, step: int) -> None:
        """Undo the round of this step, and its new states, as if it had not begun."""
        began_in, first = self._first_of_step
        if began_in != step or first == self.finished:
            return
        self._stats.totals.void(self.finished - first)
        self._take_back()
        if self._rescaling is not None:
            self._rescaling.take_back()
        self.begun = self.finished = first

    def resume(self, finished: int) -> None:
        """Continue counting from this number of rounds."""
        self.begun = self.finished = finished
        self._order.clear()
        self._first_of_step = -1, 0
