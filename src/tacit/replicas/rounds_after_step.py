"""Rounds after `optimizer.step`, for replicas that step alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tacit import ranges
from tacit.contracts import Application, Sync
from tacit.exchange.joined_requests import average_
from tacit.optimizer_hooks.kept_variance import KeptVariance
from tacit.optimizer_hooks.scaled_variance import ScaledVariance
from tacit.replicas.anchor_comparison import AnchorComparison
from tacit.replicas.bucket_deltas import MINE, BucketDeltas
from tacit.replicas.buffers import ReplicaBuffers
from tacit.replicas.consensus import Consensus, ConsensusMeter
from tacit.replicas.fragments import buckets_of_parts
from tacit.replicas.narrow_anchors import anchor_like, is_narrow, round_anchor_
from tacit.replicas.nonfinite_since import refuse_nonfinite
from tacit.replicas.observations import Observations
from tacit.replicas.optimizer_state import OptimizerState
from tacit.replicas.outside_writes import OutsideWrites
from tacit.replicas.replica import Replica
from tacit.replicas.rounds_under_way import COMMON, MEAN, MERGE, PUT, UnappliedRound, fields_of
from tacit.session import Session
from tacit.session.buckets import StateSlice
from tacit.torch_compat import is_profiling

RARE = 16
"""Steps from round to round from which on deltas have memory in rounds alone: 15 ms of a CPU for 37 MB."""
MOVED = "moved"
"""The field of how far a replica is from the common point."""


def _nothing() -> None:
    """Nobody else waits for the exchange of a bucket."""


class OptimizerHook:
    """Holds the anchor of every bucket, which the merge moves by the mean delta.

    A round sends this rank's delta, parameters minus anchor. At once or some steps later, the strategy's
    merge applies the mean to the anchor and to the parameters of that time.

    Args:
        session: exchanges the deltas; its buckets are those of the model's parts, one part after the other.
        named: the parameters, looked up again in each round; with buffers, if ranks do not wait for each
            other.
        share: the weight of this rank in the mean; 1 on average over the ranks.
        rates: reads the present learning rate of each parameter.
        buffers: the buffers that are averaged in rounds.
        on_sync: the buffers that only `sync` averages.
        variances: names of buffers that are never below 0, and may be so at a server.
        moments: the optimizers' state, if it may be exchanged.
    """

    def __init__(
        self,
        session: Session,
        named: Mapping[str, Tensor],
        share: float = 1.0,
        rates: Callable[[], Mapping[str, float]] = dict,
        buffers: ReplicaBuffers | None = None,
        variances: Collection[str] = (),
        moments: OptimizerState | None = None,
        on_sync: ReplicaBuffers | None = None,
    ) -> None:
        self._session = session
        self._named, self._share, self._rates = named, share, rates
        self._buffers, self._on_sync, self._variances = buffers, on_sync, frozenset(variances)
        self.observations = Observations(session, lambda: max(rates().values(), default=0.0))
        self._observed = self.observations if session.schedule.observed_metrics else None
        self._moments = moments
        self._timed = moments if moments is not None and moments.has_periods else None
        self._parties = session.context.coordinate.here.peers
        self.consensus = ConsensusMeter(session)
        self.writes = OutsideWrites(session.strategy, named)
        self.follow_buckets()

    def follow_buckets(self, under_way: Iterable[UnappliedRound] = (), met: int = 0) -> None:
        """Take the present parameters as the anchor, in the session's present buckets.

        `met`: the step after which they were last equal on all ranks, from a loaded checkpoint.
        """
        session, buckets, strategy = self._session, self._session.buckets, self._session.strategy
        merge = self._merge = strategy.merge
        self._late, self._meets, self._starts = strategy.late, merge.meets, strategy.rounds.start_step
        self._anchor = [anchor_like(bucket, strategy.anchor_bits) for bucket in buckets]
        rows = not merge.entrywise or session.context.by_node or session.schedule.leaves_first
        self._replica = Replica(
            buckets, self._named, self._anchor, stays=self._meets and not self._late, whole=rows
        )
        self._flat = [torch.zeros_like(bucket.like(bucket.device)) for bucket in buckets]
        self._deltas = BucketDeltas(session, self._replica, self._anchor, self._flat, self._variances)
        between = self._late or merge.ends_at_anchor or strategy.independent
        self._rare = (strategy.rounds.sync_every or 0) >= RARE and not between
        self._give_back()
        self._comparison = AnchorComparison(session, self._anchor)
        self._left = 0
        parts = buckets_of_parts(buckets, self._named, strategy.parts)
        self._parts = {part: each for part, each in enumerate(parts) if each}
        self._with_buffers = frozenset(parts[-1] if self._buffers is not None else ())
        for buffers in (self._buffers, self._on_sync):
            if buffers is not None:
                buffers.forget()
        self._equal_at: int | None = None
        self._equal_before, self._whole_since = met, 0
        self._same_at: int | None = None
        self.under_way: list[UnappliedRound] = list(under_way)
        self.writes.note()

    def _allocate(self) -> None:
        """Allocate the memory of deltas again; all of it was used before it was given back."""
        for flat in self._flat if self._rare else ():
            flat.untyped_storage().resize_(flat.nbytes)

    def _give_back(self) -> None:
        """Give back the memory of deltas, which nobody reads between two rounds."""
        for flat in self._flat if self._rare else ():
            flat.untyped_storage().resize_(0)

    def weigh(self, share: float) -> None:
        """Give this rank another weight in means; 1 on average over the ranks."""
        self._share = share

    # ---- steps ----------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Act before a step of the optimizers."""
        if self.writes.before_step(self._session.step):
            self.follow_buckets()

    def after_step(self) -> None:
        """Act after an attempt of the optimizer."""
        if self._session.failure.error is not None:
            self._session.failure.raise_first()
        self.act(self._session.step)
        self._session.advance()
        self.writes.note()

    def acts_after(self, step: int) -> bool:
        """Whether something is sent or applied after this step, or replicas begin to step alone."""
        if step < self._starts:
            return step + 1 == self._starts
        return bool(self._due(step)) or self._finishes(step)

    def _finishes(self, step: int) -> bool:
        """Whether something besides a new round is due after this step."""
        timed = self._timed is not None and self._timed.due(step)
        return timed or self._deltas.is_aside or any(way.apply_at <= step for way in self.under_way)

    def act(self, step: int) -> None:
        """Apply the answers that are due after this step, and start the rounds that are."""
        if step < self._starts:  # another level still keeps the replicas equal
            if step + 1 == self._starts:
                self._anchor_here()
            return
        due = self._due(step)
        if not (due or self._finishes(step)):
            return
        if is_profiling():
            with ranges.within(self._session.strategy.name, "sync"):
                self._act(step, due)
        else:
            self._act(step, due)

    def _act(self, step: int, due: Mapping[int, Sync]) -> None:
        if self._deltas.is_aside:
            self._deltas.take_up()
        if self._timed is not None:
            self._timed.before(step)
        if self.under_way and not (due and self._session.schedule.leaves_first):
            self._apply_until(step)
        if due:
            self._round(step, due)
        if self._timed is not None:
            self._timed.after(step)

    def _due(self, step: int) -> dict[int, Sync]:
        """The rounds after the step, by part of the model."""
        at = self._session.schedule.at
        return {part: sync for part in self._parts if (sync := at(step, part)) is not None}

    def _anchor_here(self) -> None:
        """Take the present parameters, which are equal on all ranks, as the anchor."""
        for i, anchor in enumerate(self._anchor):
            self._replica.anchor_here(i, anchor)

    @property
    def variance(self) -> ScaledVariance | KeptVariance | None:
        """The policy for Adam's variance, if there is one."""
        return None if self._moments is None else self._moments.variance

    @property
    def steps_since_equal(self) -> int | None:
        """The number of steps since the replicas were equal; None: they are equal."""
        session = self._session
        met = self.last_equal
        if session.step == met or session.schedule.inactive(session.step):
            return None
        return session.step - met

    @property
    def last_equal(self) -> int:
        """The number of steps after which the replicas were last known to be equal."""
        return self._equal_before if self._equal_at is None else self._equal_at

    def measure_consensus(self) -> Consensus | None:
        """The present consensus distance; None: it is not measured.

        A collective call: all ranks average a copy of the model, unless the replicas are known to be equal.
        """
        if self.steps_since_equal is None:
            self.consensus.equal()
        else:
            self.consensus.measure(self._replica)
        return self.consensus.last

    def sync(self) -> None:
        """Make all replicas equal now, and check that their bits are. A collective call.

        Rounds under way are applied first. The replicas become their mean, or what the merge defines instead,
        and are sent uncompressed. If one was written from outside, all start again from the mean.

        Raises:
            RoundError: an exchange failed.
        """
        session, met = self._session, self._session.step == self._equal_at
        self._allocate()
        with ranges.within(session.strategy.name, "sync"):
            written, alike = self._comparison.of_replicas(self._replica, self.writes.settle())
            if written or (met and not alike):
                self._begin_anew(alike)
            elif not met:
                self._sync()
                if not self._comparison.of_replicas(self._replica)[1]:
                    self._begin_anew(alike=False)
        self._give_back()
        self._equal_at = session.step
        self.writes.note()
        if session.step == self._same_at:
            return
        if self._on_sync is not None:
            self._on_sync.average()
        for buffers in (self._buffers, self._on_sync):
            if buffers is not None:
                buffers.copy_first()
                self._same_at = session.step

    def _begin_anew(self, alike: bool) -> None:
        """Start again from the replicas' mean, as after attach: nothing is under way, residuals are 0."""
        session = self._session
        session.flush()
        for i, flat in enumerate(() if alike else self._flat):
            self._replica.read(i, flat)
            session.ask(partial(average_, flat, session.strategy.topology.scope), f"anew{i}", of=flat)
            self._replica.write(i, self._replica.widened(i, flat))
        session.rebucket([[*bucket.members] for bucket in session.buckets], carry=False)
        self.follow_buckets()
        if self._buffers is not None:
            self._buffers.average()

    def _sync(self) -> None:
        session, last = self._session, self._session.step - 1
        self._apply_until(last, every=True)
        if session.schedule.inactive(session.step):
            self._anchor_here()
        if self._merge.ends_at_anchor:
            self._deltas.take_up()
            self._deltas.put_aside()
            self._agree()
        elif session.strategy.independent and not self._merge.keeps_unsent:
            way = self._leave(last, range(len(session.buckets)), apply_at=last)
            if way.pending is not None:
                session.pending.wait(way.pending)
            self._agree()
            if self._buffers is not None:
                self._buffers.complete(lag=0)
            self._end(way)
        else:
            self._average()

    def _average(self) -> None:
        """Average the replicas densely, including what they have not sent or not mixed."""
        session = self._session
        self.consensus.begin()
        for i, (bucket, flat) in enumerate(zip(session.buckets, self._flat, strict=True)):
            self._replica.progress(i, self._anchor[i], flat)
            if self._share != 1.0:
                flat.mul_(self._share)
            session.store.counted_(i, flat)
            session.ask(partial(average_, flat, session.strategy.topology.scope), bucket.name, of=flat)
        refuse_nonfinite(session, self._flat, self._replica.read)
        for i, (bucket, anchor) in enumerate(zip(session.buckets, self._anchor, strict=True)):
            own, mean = self._replica.params(i), self._replica.widened(i, self._flat[i])
            self.consensus.add(own, anchor, mean)
            exact = anchor.float() if is_narrow(anchor) else anchor
            self._merge.consolidate_(exact, mean, own if len(session.ranks) == 1 else None)
            if exact is not anchor:
                round_anchor_(exact, anchor, session.context.training.seed, session.step, bucket.name, "mean")
            self._replica.write(i, anchor)
        self.consensus.end()
        session.store.begin_anew()
        self._completed(range(len(session.buckets)))
        if self._buffers is not None:
            self._buffers.average()

    def _agree(self) -> bool:
        """If servers keep the parameters, move the replicas to these; returns whether they do."""
        agreed = self._session.agree(self._flat)
        for i, anchor in enumerate(self._anchor if agreed else ()):
            anchor.copy_(self._flat[i])
            self._replica.write(i, anchor)
        return agreed

    def settle_failed(self) -> None:
        """Forget the rounds under way that have not ended: their deltas are still in the parameters.

        One that has ended, and whose answer was due when something else failed, is applied.
        """
        for way in [*self.under_way]:
            if way.pending is not None and not way.pending.ended:
                self.under_way.remove(way)
                if (buffers := self._beside(way.buckets)) is not None:
                    buffers.forget_arrived()
            elif not self._late:
                self._apply(way, way.step, alone=True)

    def catch_up(self, step: int, peers: int) -> None:
        """Apply, without the others, what is due by this step, as the `peers` that there were have."""
        for way in [way for way in self.under_way if way.apply_at <= step]:
            self._apply(way, way.apply_at, alone=True, peers=peers)
        if self._buffers is not None:
            self._buffers.forget()  # so that all of them compare theirs
        if not self.under_way:  # one may have been dropped, whose deltas go with the next one
            self._whole_since = step + 1

    def moved(self) -> dict[tuple[str, str], Tensor]:
        """How far the parameters are from the common point, by the keys of `saved_state`."""
        apart = [self._replica.params(i).clone().sub_(anchor) for i, anchor in enumerate(self._anchor)]
        parts = fields_of(self._session.buckets, enumerate(apart), MOVED)
        return {key: part.tensor for key, part in parts.items()}

    def go_to_anchor(self, moved: Mapping[tuple[str, str], Tensor] = MappingProxyType({})) -> None:
        """Move the replica to the common point, and `moved` beyond it."""
        for i, (bucket, anchor) in enumerate(zip(self._session.buckets, self._anchor, strict=True)):
            params = anchor.clone()
            for param in bucket.slices:
                if (far := moved.get((param.name, MOVED))) is not None:
                    params[param.start : param.stop].add_(far)
            self._replica.write(i, params)
        self.writes.note()

    def enter(self, bring: Callable[[str, Tensor], Tensor]) -> None:
        """Take a server's parameters. `bring` sends it this rank's values of a bucket, and returns its.

        Rounds under way and unsent parts are dropped, as the server may have them already.
        """
        self.under_way.clear()
        self._deltas.forget()
        for i, bucket in enumerate(self._session.buckets):
            self._replica.read(i, self._flat[i])
            self._anchor[i].copy_(bring(bucket.name, self._flat[i]))
            self._replica.write(i, self._anchor[i])
        self.writes.note()

    # ---- rounds ---------------------------------------------------------------------------------------

    def _round(self, step: int, due: Mapping[int, Sync]) -> None:
        session, leaves_first, observed = self._session, self._session.schedule.leaves_first, self._observed
        sync = next(iter(due.values()))
        buckets = [i for part in due for i in self._parts[part]]
        self._allocate()
        read: set[int] = set()
        for way in [*self.under_way]:
            if not set(way.buckets).isdisjoint(buckets):
                self._apply(way, step, leaves=leaves_first)
                read |= set(way.buckets) if leaves_first else set()
        if leaves_first:
            if observed is not None:
                observed.observe_times(step, sync)
            sync = session.schedule.sync_at(step)  # the period may have changed
        way = self._leave(step, buckets, sync.apply_at, read, sync if step == session.step else None)
        if observed is not None:
            observed.observe_round(step, sync, way.pending, [self._flat[i] for i in buckets])
        if way.apply_at <= step:
            self._apply(way, step)
            everything = len(buckets) == len(session.buckets)
            self._equal_at = step + 1 if everything and self._meets else None
            self._give_back()

    def _leave(
        self,
        step: int,
        buckets: Sequence[int],
        apply_at: int,
        read: Collection[int] = (),
        sync: Sync | None = None,
    ) -> UnappliedRound:
        """Start a round.

        Args:
            read: the buckets whose delta has been computed already.
            sync: of the session's present step, if the schedule was asked; with a GradScaler `step` is over.
        """
        if self._left == self._comparison.due_at:
            self._comparison.before_round()
        self._left += 1
        session, deltas, buffers = self._session, self._deltas, self._beside(buckets)
        if buffers is not None:
            buffers.collect()
        for i in buckets:
            deltas.leave(i, read=i in read)
        if self._observed is not None:
            self._observed.measure([deltas.outgoing[i] for i in buckets])
        pending = session.begin(buckets, sync)
        if buffers is not None:
            buffers.leave(pending)
        for i in buckets:
            x, out = deltas.outgoing[i], self._flat[i]
            if self._share != 1.0:
                x = torch.mul(x, self._share, out=out)
            session.submit(i, x, _nothing, deltas.unsent[i], out=out)
        way = UnappliedRound(tuple(buckets), step, apply_at, pending)
        self.under_way.append(way)
        return way

    def _beside(self, buckets: Iterable[int]) -> ReplicaBuffers | None:
        """The buffers, if these buckets include the model's last part, with which they are sent."""
        return None if self._with_buffers.isdisjoint(buckets) else self._buffers

    def _apply_until(self, step: int, every: bool = False) -> None:
        for way in [way for way in self.under_way if every or way.apply_at <= step]:
            self._apply(way, step)

    def _apply(
        self, way: UnappliedRound, step: int, leaves: bool = False, alone: bool = False, peers: int = 0
    ) -> None:
        """Apply an answer.

        Args:
            leaves: whether the next round sends the delta from before it.
            alone: whether it has come, and others have applied theirs, or may not: nothing is exchanged.
            peers: how many replicas have answered; 0: as many as there are now.
        """
        session, pending, lag = self._session, way.pending, max(0, step - way.step)
        if pending is not None and not alone:
            if self._observed is None:
                session.pending.wait(pending)
            else:
                self._observed.wait(pending, lag)
        if pending is None or lag or self._merge.by_learning_rate:
            rates = self._rates()
            lr = max(rates.values(), default=0.0)
        else:  # they are as the round has read them
            rates, lr = {}, pending.context["lr"]
        met = max(self.last_equal, self._whole_since)
        at = Application(peers or len(session.ranks), lag, lr, peers or self._parties, way.step + 1 - met)
        session.stats.totals.apply(lag)
        diverged = lag > 0 and session.context.by_node and session.schedule.sync_at(step).diverged_in_node
        for i in way.buckets:
            sent = None if pending is None else pending.outcomes[i].sent
            self._deltas.apply(i, at, rates, diverged, leaves, sent, way.step)
        if (buffers := self._beside(way.buckets)) is not None:
            buffers.complete(lag)
        self._end(way, alone)

    def _end(self, way: UnappliedRound, alone: bool = False) -> None:
        self.under_way.remove(way)
        self._completed(way.buckets, alone)

    def _completed(self, buckets: Iterable[int], alone: bool = False) -> None:
        if self._moments is not None and self._moments.in_rounds:
            names = [param.name for i in buckets for param in self._session.buckets[i].slices]
            self._moments.completed(names, alone)

    # ---- checkpoints --------------------------------------------------------------------------------

    def saved_state(self) -> dict[tuple[str, str], StateSlice]:
        """The state for a checkpoint, by (parameter, field), as views; always with those of rounds under way.

        torch.distributed.checkpoint loads only what is in the present state.
        """
        buckets = self._session.buckets
        found = fields_of(buckets, enumerate(self._anchor), COMMON)
        states = [(i, *each) for i, state in enumerate(self._deltas.states) for each in state.items()]
        for i, field, tensor in states:
            found |= fields_of(buckets, [(i, tensor)], MERGE + field)
        if self._late:
            found |= fields_of(buckets, enumerate(self._flat), MEAN)
            found |= fields_of(buckets, enumerate(self._deltas.mine), MINE)
        for field, tensors in self._deltas.fields().items():
            found |= fields_of(buckets, enumerate(tensors), field)
        if self._late or not self._meets:
            found |= fields_of(buckets, enumerate(self._replica.put), PUT)
        return found if self._buffers is None else found | self._buffers.saved_state()
