"""The exchange of one bucket of a session, with the checks for NaN before and after it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import Factors, Outcome, Request
from tacit.exchange.finite_checks import finite
from tacit.exchange.joined_requests import average_
from tacit.session.bucket_states import StateStore
from tacit.session.buckets import Bucket
from tacit.session.health.device_notes import MEANS, BucketHealth
from tacit.session.health.nonfinite import NonfiniteChecks, first_infinite
from tacit.session.learning_rates import Rescaling
from tacit.session.pending_rounds import PendingRound
from tacit.session.session_context import SessionContext


@dataclass(frozen=True, slots=True)
class _Checks:
    """The checks of a bucket, which are the same in each of its exchanges.

    Attributes:
        flags: one number a rank, in which it reports NaN.
        idle: one number a parameter: whether it had no gradient; empty where ranks need not know.
        hidden: whether a payload may hide a NaN.
        told: whether ranks report NaN to each other by `flags`.
        shown: whether, without a GradScaler, encoding detects NaN in time, so that no pass before it is
            needed.
        narrow: whether a quantization level may overflow although no entry has, as the type has two bytes.
        replicated_in_node: whether all ranks of a node have equal parameters here, unless rounds let them
            diverge.
    """

    bucket: Bucket
    flags: Tensor
    idle: Tensor
    hidden: bool
    told: bool
    shown: bool
    narrow: bool
    replicated_in_node: bool


class BucketExchanges:
    """Exchanges whose values are checked on the host as soon as they are there.

    Args:
        context: of the session.
        store: the buckets, and their states.
        nonfinite: checks them.
        rescaling: rescales residuals, where they follow the learning rate.
    """

    def __init__(
        self,
        context: SessionContext,
        store: StateStore,
        nonfinite: NonfiniteChecks,
        rescaling: Rescaling | None,
    ) -> None:
        self._context, self._store, self._nonfinite = context, store, nonfinite
        self._rescaling = rescaling
        self._independent, self._me = context.strategy.independent, context.me
        self._ranks = len(context.ranks)
        # Where each rank gets another answer, a NaN is not in all of them: the ranks must report it.
        self._mixes = context.topology.mixes
        self._checks = [*map(self._checks_of, store.buckets, store.nonfinite_flags)]

    def _checks_of(self, bucket: Bucket, flags: Tensor) -> _Checks:
        hidden, topology = bucket.compressor.hides_nonfinite, self._context.topology
        return _Checks(
            bucket=bucket,
            flags=flags[: self._ranks],
            idle=flags[self._ranks :],
            hidden=hidden,
            told=hidden or self._independent or self._mixes,
            shown=not self._independent and topology.encodes_first and bucket.compressor.shows_nonfinite,
            narrow=bucket.dtype.itemsize < 4,
            replicated_in_node=bucket.names.issubset(self._context.training.replicated_in_node),
        )

    def open(self, i: int, x: Tensor, pending: PendingRound, out: Tensor) -> Generator[Request, Any, Outcome]:
        """The exchange of bucket `i` in a round; its mean overwrites `out`, which may be `x`; both are flat.

        Raises:
            NonFinite: `x` holds NaN or infinity on some rank, and there is no GradScaler; raised on all of
                them, naming the parameter and the rank.
        """
        checks, nonfinite, step = self._checks[i], self._nonfinite, pending.step
        bucket, flags = checks.bucket, checks.flags
        scale = nonfinite.scale_of(bucket) if nonfinite.scaled else 1.0
        assert not isinstance(scale, Tensor), "a factor on a device is for exchanges in stream order"
        flags.zero_()
        if checks.idle.numel():
            checks.idle.copy_(torch.tensor(self._idle_here(bucket), dtype=torch.float32))
        finite_probe: Tensor | None = None
        look: Callable[[], None] | None = None
        if checks.told:
            look = partial(self._look, checks, x, scale, step)
            if nonfinite.scaled or not checks.shown:
                look()
                look = None
        else:
            finite_probe = torch.zeros(MEANS, dtype=torch.float32)
            if scale != 1.0:
                x.div_(scale)
        outcome = yield from self._exchange(i, x, out, pending, finite_probe=finite_probe, look=look)
        if scale != 1.0:
            out.mul_(scale)
        if checks.idle.numel():
            pending.note_idle(bucket, checks.idle, self._ranks)
        if finite_probe is None and bool(flags.any()) and nonfinite.skips_given(flags, step):
            pending.skip()
        looked_at = finite_probe is not None or checks.narrow
        known = self._mixes or (outcome.finite and scale == 1.0)
        if looked_at and not known and not finite(outcome.mean):
            if self._independent:
                raise nonfinite.mean_error(bucket, outcome.mean, flags, step)
            if nonfinite.scaled:  # the mean is equal on all ranks, so all of them see it
                pending.skip()
                return outcome
            flags.zero_()
            if finite_probe is not None:
                flags[self._me] = nonfinite.mean_code(first_infinite(finite_probe), step)
            yield from average_(flags, self._context.topology.scope)
            raise nonfinite.mean_error(bucket, outcome.mean, flags, step)
        return outcome

    def _look(self, checks: _Checks, x: Tensor, scale: float, step: int) -> None:
        """Divide `x` by the scale, and note whether it was finite, unless something was noted already."""
        if not checks.flags.any():
            checks.flags[self._me] = self._nonfinite.divide(checks.bucket, x, scale, step)

    def _exchange(
        self,
        i: int,
        x: Tensor,
        out: Tensor,
        pending: PendingRound,
        *,
        finite_probe: Tensor | None,
        look: Callable[[], None] | None = None,
        health: Tensor | None = None,
    ) -> Generator[Request, Any, Outcome]:
        checks, when = self._checks[i], pending.context
        if (bucket_lr := self._context.training.bucket_lr) is not None:
            when = {**when, "lr": bucket_lr(checks.bucket.name)}
        rescale: Factors = ()
        if pending.rates and self._rescaling is not None:
            rescale = self._rescaling.factors(checks.bucket, pending.rates)
        return self._store.exchange(
            *(i, x),
            out=out,
            finite_probe=finite_probe,
            look=look,
            health=health,
            rescale=rescale,
            replicated_in_node=checks.replicated_in_node and not pending.diverged_in_node,
            **when,
        )

    def _idle_here(self, bucket: Bucket) -> list[float]:
        """One number a parameter: 1 where it had no gradient in this rank's backward."""
        idle = self._context.training.idle
        assert idle is not None
        return [float(idle(param.name)) for param in bucket.slices]


class DeviceExchanges(BucketExchanges):
    """Exchanges for which the host never waits: errors are noted on the device (see `device_rounds`)."""

    def __init__(
        self,
        context: SessionContext,
        store: StateStore,
        nonfinite: NonfiniteChecks,
        rescaling: Rescaling | None,
        healths: Sequence[BucketHealth],
    ) -> None:
        super().__init__(context, store, nonfinite, rescaling)
        self._healths = healths

    def open(self, i: int, x: Tensor, pending: PendingRound, out: Tensor) -> Generator[Request, Any, Outcome]:
        checks, health = self._checks[i], self._healths[i]
        scale = self._nonfinite.scale_of(checks.bucket)
        scaled = isinstance(scale, Tensor) or scale != 1.0
        health.begin(partial(self._idle_here, checks.bucket) if health.reports_idle else None)
        if checks.told:
            health.note_given(x)
        if scaled:
            x.div_(scale)
        finite_probe = None if checks.told else health.finite_probe
        outcome = yield from self._exchange(
            i, x, out, pending, finite_probe=finite_probe, health=health.overflow
        )
        if scaled:
            out.mul_(scale)
        if not self._mixes and (finite_probe is not None or checks.narrow):
            health.note_mean(outcome.mean)
        return outcome
