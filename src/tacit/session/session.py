"""A strategy at work on named tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from tacit.contracts import WORLD, Outcome, Request, ScheduleState, Sync, Transport
from tacit.exchange.driver import drive
from tacit.exchange.lane import Job
from tacit.session.bucket_exchange import BucketExchanges, DeviceExchanges
from tacit.session.bucket_states import StateStore
from tacit.session.buckets import Bucket, Policy, StateSlice, fitting
from tacit.session.health.device_notes import BucketHealth
from tacit.session.health.failure import SessionFailure
from tacit.session.health.nonfinite import NonfiniteChecks
from tacit.session.learning_rates import Rescaling
from tacit.session.pending_rounds import PendingRound, PendingRounds
from tacit.session.round_costs import CommStats
from tacit.session.schedule import Schedule
from tacit.session.session_context import SessionContext, Training
from tacit.session.session_lanes import Lanes, Open
from tacit.session.topology_choice import choose
from tacit.strategy import Strategy
from tacit.transports.message_layout import counted

if TYPE_CHECKING:
    from tacit.exchange.two_jobs import Halves
    from tacit.session.device_rounds import DeviceRounds

T = TypeVar("T")
_TOLD_NOTHING = Training()
_AT_ONCE = Sync(0)
"""The round after every step of `Schedule.always`, but for its number."""


class Session:
    """A strategy at work on named tensors.

    State is made eagerly, by a dry run of one exchange of every bucket on meta tensors. A round exchanges
    every bucket once; the new states replace the old ones only when all buckets are complete, so that a round
    that fails leaves no trace.

    Args:
        strategy: the communication method.
        named: the trainable parameters, by name.
        transport: answers the requests.
        names: the parameters of each bucket, in order.
        policy: chooses each parameter's compressor; None: the strategy's, and dense for parameters of fewer
            than two dimensions where the compressor exempts them.
        training: further facts of the training.
        device: see `SessionContext`.
        in_stream: whether exchanges run on a device in stream order, and the host waits for none of them:
            errors of a round are then noted there, and `pending.verify` reads them. Else each exchange is
            checked on the host.

    Attributes:
        step: attempts of the optimizer so far.
        schedule: when its rounds start, and when their answers are applied.
        store: the state that this rank keeps.
        buckets: which parameters travel together.
        ranks: the replicas that take part in a round.
        pending: the rounds under way.
        lanes: run its exchanges.
        nonfinite: finds NaN and infinity, and decides what follows.
        failure: the error that ended its exchanges, if one did.
        stats: what rounds cost.
        rescaling: rescales residuals of gradients with the learning rate; deltas are in units of the
            parameters.
    """

    def __init__(
        self,
        strategy: Strategy,
        named: Mapping[str, Tensor],
        transport: Transport,
        names: Sequence[Sequence[str]],
        policy: Policy | None = None,
        training: Training = _TOLD_NOTHING,
        device: torch.device | None = None,
        in_stream: bool = False,
    ) -> None:
        policy = policy or fitting(strategy.compressor, named)
        context = SessionContext(
            strategy, transport, dict(named), policy, training, device=device, in_stream=in_stream
        )
        self.choice = choose(context, names)
        """The topology at work, and why it was chosen; fixed."""
        self.strategy = replace(strategy, topology=self.choice.topology)
        self.context = replace(context, strategy=self.strategy)
        self.transport = transport
        self.step = 0
        self.stats = CommStats()
        self.schedule = Schedule(self.strategy, training.schedule_state)
        self._rates = training.rates
        self.rescaling = Rescaling() if strategy.subject == "gradient" else None
        self.failure = SessionFailure()
        self.nonfinite = NonfiniteChecks(self.context)
        self._stages_beside: Mapping[str, int] = {}
        self.ranks = self.context.ranks
        self.store = StateStore(self.context, names)
        self.buckets: list[Bucket] = self.store.buckets
        at = self.buckets[0].device if self.buckets else torch.device("cpu")
        self.lanes = Lanes(transport, at, in_stream, self.failure, strategy.name)
        self._lane = self.lanes.buckets
        self._stream_device = at if in_stream else None
        shared = self.failure, self.stats, self.rescaling
        self.pending = PendingRounds(*shared)
        self._on_device: DeviceRounds | None = None
        if in_stream:
            from tacit.session.device_rounds import DeviceRounds

            self.pending = self._on_device = DeviceRounds(
                self.context, *shared, self.lanes, self.nonfinite, self.ask
            )
        self._follow_store()

    # ---- buckets and their states ------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """The number of finished rounds."""
        return self.pending.finished

    def connect(self, beside: Mapping[str, int]) -> None:
        """Open the transport for the longest exchange. A collective call.

        `beside`: the number of collectives on each axis of exchanges other than buckets.
        """
        self._stages_beside = beside
        self.transport.open(dict(Counter(self.store.stages) | Counter(self._stages_beside)))

    def rebucket(self, names: Sequence[Sequence[str]], carry: bool = True) -> None:
        """Exchange in these buckets from now on; state follows its parameters. Not during a round.

        A collective call if ranks divide the buckets, as a part of the state may move to another rank.
        Without `carry` it is none, and all state is reset.
        """
        before = self.whole_state() if carry else {}
        self.store = StateStore(self.context, names)
        self._follow_store()
        with self.failure.explaining():
            self.connect(self._stages_beside)
        self.store.restore({key: kept.tensor for key, kept in before.items()})

    def _follow_store(self) -> None:
        store, ranks, me = self.store, len(self.ranks), self.context.me
        self.buckets = store.buckets
        self.nonfinite.follow_buckets(store.buckets)
        self.pending.follow_buckets(store.commit, store.take_back)
        made = self.context, store, self.nonfinite, self.rescaling
        if self._on_device is not None:
            noted = zip(store.buckets, store.nonfinite_flags, strict=True)
            healths = [BucketHealth(bucket, flags, ranks, me) for bucket, flags in noted]
            self._on_device.follow_healths(healths)
            self._exchanges: BucketExchanges = DeviceExchanges(*made, healths)
        else:
            self._exchanges = BucketExchanges(*made)

    def whole_state(self) -> dict[tuple[str, str], StateSlice]:
        """See `StateStore.gathered`. A collective call if ranks divide the buckets.

        Raises:
            RoundError: it failed.
        """
        return self.drive(self.store.gathered())

    def drive(self, exchange: Generator[Request, Any, T], key: str = "alone") -> T:
        """Run an exchange to its end in this thread. Nothing else may be under way.

        Raises:
            RoundError: it failed.
        """
        with self.failure.explaining():
            return drive(exchange, self.transport, key)

    # ---- steps and rounds --------------------------------------------------------------------------------

    def communicates(self) -> bool:
        """Whether a round follows the present step."""
        return self.schedule.always or self.schedule.at(self.step) is not None

    def commit_checked(self) -> None:
        """After a step, in stream order: commit what was checked before it (`pending.check`)."""
        self.pending.verify(())
        self.store.stay()

    def advance(self) -> None:
        """Count an attempt of the optimizer. What was exchanged before it can no longer be taken back."""
        self.store.stay()
        self.step += 1

    def resume(self, step: int, round: int, schedule_state: ScheduleState) -> None:
        """Continue counting from this step and round."""
        self.stats.resumed(step - self.step)
        self.step = step
        self.pending.resume(round)
        self.schedule.set_state(schedule_state, step)

    def begin(self, buckets: Sequence[int] | None = None, sync: Sync | None = None) -> PendingRound:
        """Start a round of these buckets, of which none is under way; by default of all.

        `sync`: what the schedule says of it; None: it is asked.

        Raises:
            RoundError: an earlier round of them has failed.
        """
        which = tuple(range(len(self.buckets)) if buckets is None else buckets)
        if self._on_device is not None:
            self._on_device.verify(which)
        begun, step, schedule = self.pending.begun, self.step, self.schedule
        sync = sync or (_AT_ONCE if schedule.always else schedule.sync_at(step))
        rates = self._rates()
        context = {
            "step": step,
            "begun": self.nonfinite.begun,
            "round": begun,
            "lr": max(rates.values(), default=0.0),
            "round_index": begun if sync.round_index is None else sync.round_index,
        }
        changed = {} if self.rescaling is None else self.rescaling.changes(rates)
        pending = PendingRound(which, step, context, sync.diverged_in_node, changed)
        self.pending.add(pending)
        return pending

    def open(self, i: int, x: Tensor) -> Generator[Request, Any, Outcome]:
        """The exchange of bucket `i`, whose bytes are counted; see `BucketExchanges.open`."""
        pending = self.pending.by_bucket.get(i) or self.begin()
        return self._counted(self._exchanges.open(i, x, pending, x), pending)

    def _counted(
        self, exchange: Generator[Request, Any, Outcome], pending: PendingRound
    ) -> Generator[Request, Any, Outcome]:
        outcome, sent = yield from counted(exchange, self.transport.place)
        pending.note_sent(sent)
        return outcome

    def submit(
        self,
        i: int,
        x: Tensor,
        completed: Callable[[], None],
        new_residual: Tensor | None = None,
        ready: Callable[[], None] | None = None,
        out: Tensor | None = None,
        halves: Halves | None = None,
    ) -> None:
        """Exchange bucket `i` in the lane.

        Args:
            i: the index of the bucket.
            x: this rank's tensor, flat; the mean overwrites it if there is no `out`.
            completed: called in the lane when the exchange has ended, also after a failure.
            new_residual: a copy of `x`, or `x` itself if there is an `out`; what was transmitted is
                subtracted from it in the end.
            ready: called in the lane before `x` is read; waits until `x` has been written.
            out: the tensor that the mean overwrites; None: `x`.
            halves: if present, one half is exchanged by this call, and the other by a second one.
        """
        bucket, pending = self.buckets[i], self.pending.by_bucket.get(i) or self.begin()
        if halves is None or not halves.begun:
            self.store.make_room(i)
            pending.submitted(self._stream_device)
        whole: Open[Outcome] = partial(self._exchanges.open, i, x, pending, x if out is None else out)
        if ready is not None:
            whole = partial(_behind, ready, whole)
        open: Open[Outcome | None] = whole if halves is None else partial(halves.next_half, whole)

        def complete(outcome: Outcome | None, sent: int) -> None:
            pending.note_sent(sent)
            if outcome is not None:
                if new_residual is not None:
                    outcome.sent.subtract_from_(new_residual)
                self.pending.complete(i, outcome)
            completed()

        def fail(error: BaseException) -> None:
            self.failure.lane_failed(error)
            pending.over.set()
            completed()

        inline = bucket.compressor.inline and ready is None
        self._lane.submit(Job(bucket.name, open, complete, fail, inline))
        if self._stream_device is not None and pending.bucket_submitted():
            self.lanes.settle()

    def submit_beside(
        self, pending: PendingRound, open: Open[T], key: str, completed: Callable[[T], None]
    ) -> None:
        """Exchange something else than buckets in this round, before any of its buckets is submitted.

        `completed` is called in the lane, with the answer.
        """
        pending.submitted_beside()

        def complete(answer: T, sent: int) -> None:
            completed(answer)
            pending.completed_beside(sent)
            self.pending.end(pending)

        self.lanes.submit_on_host(self.lanes.job(key, open, complete, pending.over.set))

    def complete(self, i: int, outcome: Outcome) -> None:
        """Note that bucket `i` is complete; the last one of a round commits it, unless it is skipped."""
        self.pending.complete(i, outcome)

    def ask(self, open: Open[T], key: str, of: Tensor | None = None, counted: bool = True) -> T:
        """Run an exchange that is not of a bucket, after all that was submitted, and return its answer.

        `of`: the tensor that is sent, if it may be on a device. `counted`: whether its bytes count as sent.

        Raises:
            RoundError: it failed, or an earlier exchange did.
        """
        on_host = of is None or of.device != self.lanes.device
        with self.pending.waited_for():
            (found,) = self.lanes.ask(
                [(open, key)], self.stats.sent if counted else lambda nbytes: None, on_host
            )
        self.lanes.join()
        return found

    def agree(self, xs: Sequence[Tensor]) -> bool:
        """Make `xs`, one tensor a bucket, equal on all ranks; returns False if a round alone does that.

        All buckets are exchanged at once: a server ends a round without the workers that ask for this, bucket
        by bucket. A worker that has asked in one bucket and not in the next would wait for a worker that
        waits for its push in the next.

        Raises:
            RoundError: it failed, or an earlier exchange did.
        """
        server = self.strategy.server
        if server is None or not server.independent or not self.buckets:
            return False
        asked = [(_always(server.agree(x)), bucket.name) for x, bucket in zip(xs, self.buckets, strict=True)]
        with self.pending.waited_for():
            self.lanes.ask(asked, self.stats.sent)
        return True

    def take_back(self) -> None:
        """Undo the exchanges of the present step, as if it had exchanged nothing.

        Raises:
            RoundError: its round failed, or an earlier one did.
        """
        self.flush()
        self.pending.take_back(self.step)

    def flush(self) -> None:
        """Wait until nothing is under way.

        Raises:
            RoundError: the round under way failed, or an earlier one did.
        """
        self.pending.wait_from_now()
        self.lanes.flush()
        self.failure.raise_first()
        self.pending.verify()
        self.lanes.join()

    def close(self) -> None:
        """Drain and end the lanes."""
        self.lanes.close()

    # ---- descriptions and metrics
    # ----------------------------------------------------------------------------

    @property
    def summary(self) -> str:
        """A few words on what is at work: strategy, topology and compressors."""
        from tacit.session.description import sentence

        has_feedback = any(self.store.residuals(name) for bucket in self.buckets for name in bucket.names)
        return sentence(self.strategy, self.buckets, has_feedback)

    def describe(self) -> list[str]:
        """Lines that describe what is at work: the strategy, why it has this topology, and each bucket."""
        from tacit.session.description import detail

        sent = [cost.sent.total() for cost in self.store.costs]
        return list(detail(self.strategy, self.choice, self.buckets, sent))

    def metrics(self) -> dict[str, float]:
        """The session's metrics.

        `steps`; `rounds`; `void_rounds`, of these, that were skipped or taken back;
        `bytes_out`, sent by this rank by the collectives' formulas; `closing_bytes_out`, sent by closing it;
        `ddp_bytes_out`, what DDP would have sent in as many steps; `compression`, the last over the first;
        `exchange_seconds`, with a round under way; `exposed_seconds`, of these, with training waiting;
        `compute_share`, the share of the time between rounds that was not spent waiting; `lag`, how many
        steps after its round had left an answer was applied, on average.
        """
        self.pending.verify()
        peers = self.transport.place(WORLD).peers
        return self.stats.metrics(self.step, 2 * (peers - 1) / peers * self.context.dense_bytes)


def _behind(ready: Callable[[], None], open: Open[T]) -> Generator[Request, Any, T]:
    """The exchange, once its tensor has been written."""
    ready()
    return open()


def _always(x: T) -> Callable[[], T]:
    """A function that returns this value."""
    return lambda: x
