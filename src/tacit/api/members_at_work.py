"""A strategy among members that come and go: at work in one period after another, each with its members."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.api.at_work import AtWork
from tacit.api.away import TimeAlone, way_of
from tacit.api.member_changes import NO_CHECKPOINT, MembersChange, PeriodChange, Preemption, begun
from tacit.api.semi_synchronous import SemiSynchronous
from tacit.api.shard_at_work import ShardAtWork
from tacit.attaching.agreement import trained
from tacit.errors import AttachError, NonFinite, RoundError
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.members.lives import BEAT
from tacit.members.record import MemberArrival, Period, form
from tacit.members.roster import Members, Roster
from tacit.model.trained_model import locals_of
from tacit.optimizer_hooks.global_hooks import StepsHandle, after_steps, before_steps
from tacit.replicas.buffers import ReplicaBuffers, found_in
from tacit.replicas.replica import LiveTensors
from tacit.timelines import Timeline
from tacit.transports.replica_ranks import ReplicaRanks

_log = logging.getLogger("tacit")

ATTEMPTS = 3
"""How often a round may fail among the same members, before its error is the user's."""


class MembersAtWork:
    """Reports what `AtWork` does, of the present period, and carries the state from one to the next.

    Args:
        specs: the arguments of `attach`, checked, for each shard that this process has; mostly one.
        given: how many members, and where they find each other.

    Attributes:
        now: the strategy at work in the present period.
        changes: the last thousand periods that this member has come to after its first.

    Raises:
        AttachError: this replica does not train what the others train.
        PeerLost: there are too few members, or no store.
    """

    choice = None

    def __init__(self, specs: Sequence[AttachSpec], given: Members) -> None:
        way = way_of(given)
        specs = [replace(each, hubs=way.hubs) for each in specs]
        spec = self._spec = specs[0]
        self._given = given
        self.changes: deque[PeriodChange] = deque(maxlen=1000)
        self._says: Callable[[], Mapping[str, Any]] = dict
        self._said: Mapping[str, Any] = {}
        self._waits, self._ended = "", False
        self._counted = self._averaged = False
        self._failures = self._lost = 0
        self._sent = 0, 0
        """How many rounds are finished, and after how many steps the last one was."""
        self._preemption = Preemption()
        self._alone_after = any(level.subject == "delta" for level in spec.strategy.levels)
        limit = spec.time_limit + timedelta(seconds=given.patience)
        self._ranks = ReplicaRanks(1 if spec.sharded is None else spec.sharded.shards, limit, len(specs))
        numbered = zip(specs, self._ranks.own, strict=True)
        self._shards = [ShardAtWork(each, number, self._count) for each, number in numbered]
        calls = self._life, self._called, self._leave_if_preempted
        self.roster = Roster(given, self._ranks, *calls, way)
        self._alone = TimeAlone(self.roster, given.patience)
        self._semi = SemiSynchronous(self.roster, given.semi_synchronous, spec.weight)
        self._handles: list[StepsHandle] = []
        try:
            described = {**trained(spec), "semi_synchronous": str(given.semi_synchronous)}
            described["version of tacit"] += f", members' texts {form()}"
            self.roster.begin(described)
            self._shards[0].warm_up()
            self._enter()
            self._finish_step()
        except BaseException:
            self.roster.leave(calls=True)
            for shard in self._shards:
                shard.leave()
            self._let_go()
            raise
        self._handles = [before_steps(self._stepping), after_steps(self._stepped)]
        self._preemption.listen()

    @property
    def now(self) -> AtWork:
        """The strategy at work in the present period; of several shards the first one's."""
        return self._shards[0].now

    # ---- what a sampler asks ----------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the present period, from 1."""
        return self.roster.period.number

    @property
    def place(self) -> int:
        """This replica's rank among the members."""
        return self.roster.place

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.roster.period.members)

    @property
    def names(self) -> tuple[str, ...]:
        """The members' names, in the order of their ranks."""
        return tuple(each.name for each in self.roster.period.members)

    def told(self) -> Sequence[Mapping[str, Any]]:
        """What the samplers of the last period's members have said last; also of those that are gone."""
        return self.roster.period.said

    def follow(self, says: Callable[[], Mapping[str, Any]]) -> None:
        """Tell the others what `says` returns (JSON) after each step; the thread that trains calls it."""
        self._says = says

    # ---- periods ----------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        """How many steps were taken, with the one in hand."""
        return self.now.levels[-1].session.step + self._shards[0].unacted

    @property
    def levels(self) -> list[Level]:
        """The levels of all shards that this process has."""
        return [level for shard in self._shards for level in shard.levels]

    @property
    def _unacted(self) -> bool:
        """Whether what follows the last step is still to come, on one of the shards."""
        return any(shard.unacted for shard in self._shards)

    @property
    def _error(self) -> BaseException | None:
        return next((shard.error for shard in self._shards if shard.error is not None), None)

    def _life(self) -> dict[str, Any]:
        levels = self._shards[0].levels
        rounds, step = [level.session.pending for level in levels], self._step if levels else 0
        return {
            "step": step,
            "waits": self._waits,
            "says": self._said,
            "begun": sum(each.begun for each in rounds),
            "in_round": any(each.by_bucket for each in rounds),
            "unsent": max(0, step - self._sent[1]),
            "extra": self._semi.extra,
        }

    def _called(self) -> None:
        """End what is under way; called in the roster's thread."""
        error = MembersChange("the members change")
        for level in self.levels:
            level.session.failure.fail(error)
            level.transport.abort(error)

    def _change(self, closing: bool = False) -> bool:
        """Go over into the next period. Returns whether this member takes part in it."""
        began, before = time.monotonic(), self.names
        for shard in self._shards:
            shard.stop()
        self._end_period()
        takes_part = self._enter(closing)
        if takes_part:
            self._failures = self._failures + 1 if self.names == before else 0
            self.changes.append(PeriodChange(self.number, self.names, time.monotonic() - began))
        return takes_part

    def _end_period(self) -> None:
        for shard in self._shards:
            shard.end()

    def _enter(self, closing: bool = False) -> bool:
        """Meet the others, and begin a period with them. Returns whether this member takes part in it."""
        if self._spec.sharded is not None:
            self._spec.sharded.reshard()
        while True:
            kept = self._shards[0].kept
            step = 0 if kept is None else kept.session["steps"][-1] + self._shards[0].unacted
            mine = MemberArrival(
                id="",
                name="",
                ready=kept is not None,
                step=step,
                closing=closing,
                weight=self._spec.weight or 0.0,
                says=dict(self._says()),
                ranks=[shard.arrival() for shard in self._shards],
            )
            period = self.roster.meet(mine)
            self._lost += period.lost if kept is not None else 0
            if self.roster.place < 0:
                return False
            begin = [partial(each.begin, period, self.roster, self._given.silence) for each in self._shards]
            take = [partial(each.take, period, self.roster.place) for each in self._shards]
            if self._all(begin) and self._all(take):
                self._note_taken(period)
                return True
            self._end_period()
            self.roster.call()

    def _all(self, calls: Sequence[Callable[[], bool]]) -> bool:
        """Make calls with which a period begins. Returns whether no rank has failed."""
        done = all(begun(call, self.size) for call in calls)
        return not any(self._ranks.any(not done))

    def _note_taken(self, period: Period) -> None:
        first = self._shards[0]
        for shard in self._shards:
            shard.go_on()
        if self.roster.place in period.behind(first.number):
            self._sent = first.rounds, first.levels[-1].session.step + first.unacted
        if self._ranks.rank == 0:
            if period.number > 1 and not any(each.ready or each.known for each in period.members):
                _log.warning(
                    "all members of period %d are gone, and their state with them: training begins anew",
                    period.number - 1,
                )
            _log.warning(
                "period %d of training, with %d members: %s",
                *(period.number, self.size, ", ".join(self.names)),
            )

    # ---- before and after every step --------------------------------------------------------------------

    def _stepping(self, optimizer: Optimizer) -> None:
        """Called before a step of any optimizer: average the gradients, if that is what is exchanged."""
        first = self._shards[0]
        if first.gradients is None or self._averaged or self._ended or optimizer not in self._spec.optimizers:
            return
        while not self._averaged:
            try:
                if self.roster.called.is_set():
                    raise MembersChange("the members change")
                first.gradients.average(self.now.levels[0].session)
            except RoundError as error:
                self._refuse_own(error)
                self._go_on()
            else:
                self._averaged, self._failures = True, 0

    def _count(self, shard: ShardAtWork, act: Callable[[], None]) -> None:
        """Called when a step is counted, with what follows it."""
        if self._semi.goes_on(self.now.levels):
            self._said = self._says()
            return
        self._counted = True
        self._around(shard, act)

    def _around(self, shard: ShardAtWork, act: Callable[[], None]) -> None:
        """Do what follows a step, unless the members change, or this has failed on another shard."""
        self._averaged, self._said = False, self._says()
        if not self._alone_after:  # nothing is exchanged then
            act()
            return
        shard.put_off()
        if self.roster.called.is_set() or self._alone.steps or self._error is not None:
            return

        def weighed() -> None:
            self._semi.weigh(self.now.levels)
            act()

        if shard.act(weighed):
            self._failures = 0

    def _stepped(self, _: Optimizer) -> None:
        """Called after a step of any optimizer, when all other hooks have been called."""
        if self._semi.beyond:
            self._leave_if_preempted()
        if not self._counted or self._ended:
            return
        unacted, preempted = self._ranks.any(self._unacted, self._preemption.noted)
        if unacted and any(self._ranks.any(self._alone.goes_on(self._alone_after))):
            missing = [shard for shard in self._shards if shard.unacted]
            self._alone.miss([level for shard in missing for level in shard.levels])
            for shard in missing:
                shard.miss()
        elif unacted:
            self._refuse_own(self._error)
            self._go_on()
        self._counted = False
        if self._shards[0].rounds != self._sent[0]:
            self._sent = self._shards[0].rounds, self._step
        if preempted:
            self._preemption.note()
        self._leave_if_preempted()

    def _go_on(self, closing: bool = False) -> bool:
        """Go over into another period, and end the step that its members have in hand.

        Whoever has not taken that step, as a newcomer, takes part in what follows it.

        Returns: Whether this member takes part in it.
        """
        return self._change(closing) and self._finish_step()

    def _finish_step(self) -> bool:
        for shard in self._shards:
            if shard.unacted:
                self._around(shard, shard.now.hooks.act_after_step)
        if any(self._ranks.any(self._unacted)):
            self._refuse_own(self._error)
            return self._go_on()
        return True

    def _leave_if_preempted(self) -> None:
        """Leave and end, if the machine is to be taken away."""
        if self._preemption.noted:
            _log.warning("%s is to end (SIGTERM), and leaves after step %d", self.roster.name, self._step)
            self.leave()
            os.kill(os.getpid(), signal.SIGTERM)

    def _refuse_own(self, error: BaseException | None) -> None:
        """Raise an error that this member has caused, or that comes back whoever takes part."""
        if error is None:
            return
        named = [p for shard in self._shards for p in shard.spec.named.values()]
        held = {str(i): x for i, x in enumerate((*named, *(p.grad for p in named))) if x is not None}
        own = isinstance(error, NonFinite) and any(
            not bool(torch.isfinite(x).all()) for x in locals_of(held).values()
        )
        called = isinstance(error, MembersChange) and error.__cause__ is None  # by others
        if own or (self._failures >= ATTEMPTS and not called):
            raise error
        if isinstance(error, NonFinite) and self._ranks.rank == 0:
            _log.warning("period %d, members %s: %s", self.number, ", ".join(self.names), error)

    # ---- the end ----------------------------------------------------------------------------------------

    def sync(self) -> None:
        """Make all replicas equal, when all members have called it.

        Raises:
            RoundError: others have gone on without it.
        """
        self._waits = "sync"
        try:
            if not self._together("sync", self._make_equal_now, closing=False):
                raise RoundError(
                    "session.sync() was called after a step after which other members have not called it: "
                    "call it on every member after the same step"
                )
        finally:
            self._waits = ""

    def make_equal(self) -> None:
        """As `AtWork.make_equal`, if all members come to their end; else this one takes the common point."""
        self._waits = "close"
        if self._together("close", self._end_now, closing=True):
            self._waits = "done"
            until = time.monotonic() + 2 * self._given.silence
            while not self.roster.all_wait("done") and time.monotonic() < until:
                time.sleep(BEAT / 2)
            self._ended = True
        else:
            self.go_to_common_point()

    def _make_equal_now(self) -> None:
        self._semi.weigh(self.now.levels, closes=True)
        for shard in self._shards:
            shard.now.sync()
        self._average_buffers()

    def _end_now(self) -> None:
        self._semi.weigh(self.now.levels, closes=True)
        for shard in self._shards:
            shard.now.make_equal()
        self._average_buffers()

    def _average_buffers(self) -> None:
        """Average BatchNorm's statistics where gradients are exchanged: each member has its own till then."""
        if not self._alone_after:
            module = self._spec.model.module
            tensors = LiveTensors(module, found_in(self._spec.model))
            buffers = ReplicaBuffers(self.now.levels[0].session, tensors, 1.0)
            buffers.average()
            buffers.copy_first()

    def go_to_common_point(self) -> None:
        """Give the model the parameters on which all members last agreed."""
        for shard in self._shards:
            shard.to_common_point()

    def _together(self, what: str, call: Callable[[], None], closing: bool) -> bool:
        """Make a collective call once all members wait for it. Returns False if others have gone on."""
        while True:
            self._leave_if_preempted()
            failed = any(shard.now.failures.first is not None for shard in self._shards)
            if any(self._ranks.any(failed or self.roster.called.is_set())):
                if not self._go_on(closing):
                    return False
                continue
            together = self._ranks.first(lambda: self.roster.all_wait(what))
            if together is None:
                time.sleep(BEAT / 2)
                continue
            if not together:
                return False
            error: RoundError | None = None
            try:
                call()
            except RoundError as its:
                error = its
            if not any(self._ranks.any(error is not None)):
                return True
            self._refuse_own(error)
            self._go_on(closing)

    def leave(self) -> None:
        """As `AtWork.leave`; the other members go on."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._preemption.close()
            self._semi.close()
            self.roster.leave(calls=not self._ended)
            self._ended = True
            for shard in self._shards:
                shard.leave()
            self._let_go()

    def _let_go(self) -> None:
        """Remove what makes shards of a whole optimizer's steps."""
        if len(self._shards) > 1:
            from tacit.levels.whole_as_shards import let_go

            for shard in self._shards:
                let_go(shard.spec)

    # ---- what it reports --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """As `AtWork.metrics`, of all periods; and `members`, `period`, `changes`, and `lost_steps`.

        These are the steps that others had taken since their last rounds when they died or left. With
        semi_synchronous also `extra_steps`, which this member has taken beyond its periods.
        """
        numbers = self._shards[0].metrics()
        for shard in self._shards[1:]:
            numbers["bytes_out"] += shard.metrics()["bytes_out"]
        members = {"members": self.size, "period": self.number, "changes": len(self.changes)}
        mine = {"steps": float(self._step), "lost_steps": self._lost, **self._semi.metrics}
        return {**numbers, **members, **mine}

    def timeline(self) -> Timeline:
        """As `AtWork.timeline`, of the present period."""
        return self.now.timeline()

    @property
    def active_path(self) -> str:
        """What runs, in one sentence."""
        shards = f", as {len(self._shards)} shards" if len(self._shards) > 1 else ""
        return f"{self.now.active_path}{shards}; member {self.place} of {self.size} in period {self.number}"

    def describe(self) -> str:
        """What runs, in lines."""
        return f"{self.now.describe()}\n\nperiod {self.number}: {', '.join(self.names)}"

    def observe(self, loss: Tensor | float) -> None:
        """As `AtWork.observe`."""
        self.now.observe(loss)

    def check_called(self) -> None:
        """As `AtWork.check_called`."""
        self.now.check_called()

    def state_dict(self) -> dict[str, Any]:
        """Refused: the members that live are the checkpoint."""
        raise AttachError(NO_CHECKPOINT)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refused: a member takes its state from those that live."""
        raise AttachError(NO_CHECKPOINT)
