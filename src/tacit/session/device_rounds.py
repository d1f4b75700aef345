"""Rounds on a device that the host does not wait for, committed when the device's notes have been read."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tacit.contracts import Outcome
from tacit.errors import RoundError, TacitError
from tacit.exchange.finite_checks import overflow
from tacit.exchange.joined_requests import average_
from tacit.session.buckets import Bucket
from tacit.session.health.device_notes import BucketHealth, DeviceReport, HealthReport
from tacit.session.health.failure import SessionFailure
from tacit.session.health.nonfinite import NonfiniteChecks, first_infinite
from tacit.session.learning_rates import Rescaling
from tacit.session.pending_rounds import PendingRound, PendingRounds
from tacit.session.round_costs import CommStats
from tacit.session.session_context import SessionContext
from tacit.session.session_lanes import Lanes, Open


class _Ask(Protocol):
    def __call__(self, open: Open[None], key: str) -> None: ...


class DeviceRounds(PendingRounds):
    """Rounds in stream order: committed only after the host has read what the device noted about them.

    Args:
        context: of the session; `failure`, `stats` and `rescaling` too.
        lanes: run its exchanges.
        nonfinite: decides whether NaN or infinity skips the round or is an error.
        ask: runs an exchange of something else than a bucket; see `Session.ask`.
    """

    def __init__(
        self,
        context: SessionContext,
        failure: SessionFailure,
        stats: CommStats,
        rescaling: Rescaling | None,
        lanes: Lanes,
        nonfinite: NonfiniteChecks,
        ask: _Ask,
    ) -> None:
        super().__init__(failure, stats, rescaling)
        self._context, self._lanes, self._nonfinite, self._ask = context, lanes, nonfinite, ask
        self._unverified: list[PendingRound] = []
        self._checked: set[PendingRound] = set()

    def follow_healths(self, healths: Sequence[BucketHealth]) -> None:
        """Use these notes of the present buckets from now on."""
        self._healths = healths

    def _ended(self, pending: PendingRound, seconds: tuple[float, float] | None = None) -> None:
        with self._lanes.inside():
            noted = [(i, self._healths[i]) for i in pending.buckets]
            pending.report_from(DeviceReport(noted, pending.began))
        self._unverified.append(pending)

    def wait_from_now(self) -> None:
        for pending in [*self.by_bucket.values(), *self._unverified]:
            pending.waits_on(self._lanes.device)

    def wait(self, pending: PendingRound) -> None:
        """Wait until the device has run the round. Only the host waits, and not for later rounds."""
        pending.waits_on(self._lanes.device)
        super().wait(pending)
        if pending in self._unverified:
            self._verify(pending)

    def verify(self, buckets: Collection[int] | None = None) -> None:
        for pending in [*self._unverified]:
            report = pending.device_report
            assert report is not None
            due = buckets is None or not set(buckets).isdisjoint(pending.buckets)
            # Early only if that needs no exchange: the devices of other ranks may not have come so far.
            if due or pending in self._checked or (report.done and report.quiet):
                self._verify(pending)

    def check(self) -> None:
        for pending in [*self._unverified]:
            self._check(pending)

    def _verify(self, pending: PendingRound) -> None:
        self._check(pending)
        self._checked.discard(pending)
        self._unverified.remove(pending)
        assert pending.device_report is not None
        super()._ended(pending, pending.device_report.seconds())

    def _check(self, pending: PendingRound) -> None:
        if pending in self._checked:
            return
        assert pending.device_report is not None
        try:
            reports = pending.device_report.read()
            if any(report.wrong for report in reports.values()):
                self._failure.raise_lost()
            self._failure.raise_first()  # a peer may have been lost meanwhile, and its collectives given up
            for i, report in reports.items():
                self._judge(self._healths[i].bucket, report, pending, pending.outcomes[i])
        except TacitError as error:
            self._unverified.remove(pending)
            if self._failure.error is None:
                explained = self._failure.explained(error) if isinstance(error, RoundError) else error
                self._failure.fail(explained)
            self._failure.raise_first()
        self._checked.add(pending)

    def _judge(self, bucket: Bucket, report: HealthReport, pending: PendingRound, outcome: Outcome) -> None:
        """Raise the error that the device has noted for a bucket, if it has noted one.

        Raises:
            NonFinite: a rank's tensor holds NaN or infinity, and there is no GradScaler.
            Overflow: finite entries became too large on the way.
        """
        checks, context, step = self._nonfinite, self._context, pending.step
        pending.note_idle(bucket, report.idle, len(context.ranks))
        hidden = bucket.compressor.hides_nonfinite or context.topology.mixes
        if report.given and hidden and checks.skips_given(self._origin_codes(bucket, report, step), step):
            pending.skip()
        if report.overflow and not pending.skipped:
            where = ", ".join(str(context.global_ranks[place]) for place in report.overflow)
            raise overflow(bucket.name, checks.global_step(step), bucket.dtype, f" of rank {where}")
        if not report.mean:
            return
        if checks.scaled:
            pending.skip()
            return
        codes = torch.zeros(len(context.ranks), dtype=torch.float32)
        codes[context.me] = checks.mean_code(0 if hidden else first_infinite(report.finite_probe), step)
        self._average(codes)
        raise checks.mean_error(bucket, outcome.mean, codes, step)

    def _origin_codes(self, bucket: Bucket, report: HealthReport, step: int) -> Tensor:
        """Every rank's code of the parameter in which the NaN began, for `NonfiniteChecks.skips_given`."""
        context = self._context
        codes = torch.zeros(len(context.ranks), dtype=torch.float32)
        if self._nonfinite.scaled:
            return codes.fill_(1.0)  # no more is needed
        if report.first is not None:
            name = bucket.slices[report.first].name
            codes[context.me] = self._nonfinite.parameter_code(step, name)
        self._average(codes)
        return codes

    def _average(self, codes: Tensor) -> None:
        """Overwrite the codes with their mean over the ranks."""
        self._ask(lambda: average_(codes, self._context.topology.scope), "nonfinite")

    @property
    def broken(self) -> Tensor | None:
        if not self._unverified:
            return None
        self._lanes.join()
        return torch.stack([self._healths[i].broken for i in self._unverified[-1].buckets]).any()

    def begin_anew(self) -> None:
        self._lanes.settle()  # what stopped at numbers of the device ends in its own round
        self.verify()
        super().begin_anew()
