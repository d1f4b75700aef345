"""The exchange of one bucket of a session, and what is looked at around it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import MixingTopology, Outcome, Request
from tacit.exchange.combinators import average_
from tacit.exchange.health import finite
from tacit.session.buckets import Bucket
from tacit.session.config import SessionConfig
from tacit.session.health.device_notes import MEANS, BucketHealth
from tacit.session.health.nonfinite import NonfiniteChecks, first_infinite
from tacit.session.rescaling import Rescaling
from tacit.session.rounds import PendingRound
from tacit.session.state import StateStore
from tacit.transports.meter import counted


class BucketExchanges:
    """Exchanges whose values are looked at on the host, as they come.

    Args:
        config: of the session.
        store: the buckets, and their states.
        nonfinite: looks at them.
        rescaling: of residuals, where they follow the learning rate.
    """

    def __init__(
        self,
        config: SessionConfig,
        store: StateStore,
        nonfinite: NonfiniteChecks,
        rescaling: Rescaling | None,
    ) -> None:
        self._config, self._store, self._nonfinite = config, store, nonfinite
        self._rescaling = rescaling
        self._place = config.context.transport.place

    def open(self, i: int, x: Tensor, pending: PendingRound, out: Tensor) -> Generator[Request, Any, Outcome]:
        """The exchange of bucket `i` in a round; its mean overwrites `out`, which may be `x`; both are flat.

        Raises:
            NonFinite: `x` holds NaN or infinity on some rank, and there is no GradScaler; raised on all of
                them, naming the parameter and the rank.
        """
        bucket, nonfinite_flags = self._store.buckets[i], self._store.nonfinite_flags[i]
        context, checks, step = self._config.context, self._nonfinite, pending.step
        ranks, me = len(context.ranks), context.me
        scale = checks.scale_of(bucket)
        assert not isinstance(scale, Tensor), "a factor on a device is for what is in stream"
        nonfinite_flags.zero_()
        if len(nonfinite_flags) > ranks:
            nonfinite_flags[ranks:] = torch.tensor(self._idle_here(bucket), dtype=torch.float32)
        finite_probe, look, independent = None, None, self._config.independent
        # Where each rank gets another answer, a NaN is not in all of them: the ranks must tell each other.
        mixes = isinstance(self._config.strategy.topology, MixingTopology)
        if bucket.compressor.hides_nonfinite or independent or mixes:
            look = partial(self._look, i, x, scale, step)
            if not self._shows_nonfinite(bucket):
                look()
                look = None
        else:
            finite_probe = torch.zeros(MEANS, dtype=torch.float32)
            if scale != 1.0:
                x.div_(scale)
        outcome = yield from self._conduct(i, x, out, pending, finite_probe=finite_probe, look=look)
        if scale != 1.0:
            out.mul_(scale)
        nonfinite_flags, idle = nonfinite_flags[:ranks], nonfinite_flags[ranks:]
        pending.note_idle(bucket, idle, ranks)
        if finite_probe is None and checks.skips_given(nonfinite_flags, step):
            pending.skip()
        # In types of two bytes a level may be beyond what the entry was, and so beyond the type.
        looked_at = finite_probe is not None or bucket.dtype.itemsize < 4
        known = mixes or (outcome.finite and scale == 1.0)
        if looked_at and not known and not finite(outcome.mean):
            if independent:
                raise checks.mean_error(bucket, outcome.mean, nonfinite_flags, step)
            if checks.scaled:  # the mean is equal on all ranks, so all of them see it
                pending.skip()
                return outcome
            nonfinite_flags.zero_()
            if finite_probe is not None:
                nonfinite_flags[me] = checks.mean_code(first_infinite(finite_probe), step)
            yield from average_(nonfinite_flags, self._config.strategy.topology.scope)
            raise checks.mean_error(bucket, outcome.mean, nonfinite_flags, step)
        return outcome

    def _shows_nonfinite(self, bucket: Bucket) -> bool:
        """Whether encoding tells of a NaN in time, so that a pass that looks for it can be spared."""
        if self._nonfinite.scaled or self._config.independent:
            return False
        return bucket.compressor.shows_nonfinite and self._config.strategy.topology.encodes_first

    def _look(self, i: int, x: Tensor, scale: float, step: int) -> None:
        """Divide `x` by the scale, and note whether it was finite, unless something was noted already."""
        flags, context = self._store.nonfinite_flags[i], self._config.context
        if not flags[: len(context.ranks)].any():
            flags[context.me] = self._nonfinite.divide(self._store.buckets[i], x, scale, step)

    def _conduct(
        self, i: int, x: Tensor, out: Tensor, pending: PendingRound, **more: Any
    ) -> Generator[Request, Any, Outcome]:
        config, bucket, context = self._config, self._store.buckets[i], pending.context
        if config.bucket_lr is not None:
            context = {**context, "lr": config.bucket_lr(bucket.name)}
        replicated_in_node = not pending.diverged_in_node and config.replicated_in_node.issuperset(
            param.name for param in bucket.slices
        )
        rescale = self._rescaling.factors(bucket, pending.rates) if self._rescaling and pending.rates else ()
        exchange = self._store.exchange(
            i, x, out, replicated_in_node=replicated_in_node, rescale=rescale, **context, **more
        )
        outcome, sent = yield from counted(exchange, self._place)
        pending.note_sent(sent)
        return outcome

    def _idle_here(self, bucket: Bucket) -> list[float]:
        """Of each parameter, whether it took no part in this rank's backward."""
        idle = self._config.context.idle
        assert idle is not None
        return [float(idle(param.name)) for param in bucket.slices]


class DeviceExchanges(BucketExchanges):
    """The same where the host waits for nothing: what went wrong is noted on the device (`device_rounds`)."""

    def __init__(
        self,
        config: SessionConfig,
        store: StateStore,
        nonfinite: NonfiniteChecks,
        rescaling: Rescaling | None,
        healths: Sequence[BucketHealth],
    ) -> None:
        super().__init__(config, store, nonfinite, rescaling)
        self._healths = healths

    def open(self, i: int, x: Tensor, pending: PendingRound, out: Tensor) -> Generator[Request, Any, Outcome]:
        bucket, health = self._store.buckets[i], self._healths[i]
        scale = self._nonfinite.scale_of(bucket)
        scaled = isinstance(scale, Tensor) or scale != 1.0
        health.begin(partial(self._idle_here, bucket) if health.reports_idle else None)
        if bucket.compressor.hides_nonfinite:
            health.note_given(x)
        if scaled:
            x.div_(scale)
        finite_probe = None if bucket.compressor.hides_nonfinite else health.finite_probe
        outcome = yield from self._conduct(
            i, x, out, pending, finite_probe=finite_probe, health=health.overflow
        )
        if scaled:
            out.mul_(scale)
        if finite_probe is not None or bucket.dtype.itemsize < 4:
            health.note_mean(outcome.mean)
        return outcome
