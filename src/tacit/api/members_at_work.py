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
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from tacit.api.at_work import AtWork
from tacit.api.away import TimeAlone, end_under_way, way_of
from tacit.api.member_changes import NO_CHECKPOINT, MembersChange, PeriodChange, Preemption, begun, lost
from tacit.attaching.agreement import trained
from tacit.checkpoint import carried
from tacit.checkpoint.carried import CarriedState
from tacit.errors import AttachError, NonFinite, RoundError
from tacit.gradients.before_step import StepGradients
from tacit.gradients.ddp_hook import HookDispatcher, no_exchange
from tacit.levels.spec import AttachSpec
from tacit.members.lives import BEAT
from tacit.members.record import MemberArrival, Period, RankArrival
from tacit.members.roster import Members, Roster
from tacit.model.trained_model import locals_of
from tacit.optimizer_hooks.global_hooks import StepsHandle, after_steps, before_steps
from tacit.replicas.buffers import ReplicaBuffers, found_in
from tacit.replicas.replica import LiveTensors
from tacit.session import in_turn
from tacit.timelines import Timeline
from tacit.torch_compat import HashStore
from tacit.transports.member_links import receive_from, send_to
from tacit.transports.process_groups import disband, meeting_by, member_group
from tacit.transports.replica_ranks import ReplicaRanks

_log = logging.getLogger("tacit")

ATTEMPTS = 3
"""How often a round may fail among the same members, before its error is the user's."""


class MembersAtWork:
    """Reports what `AtWork` does, of the present period, and carries the state from one to the next.

    Args:
        spec: the arguments of `attach`, checked.
        given: how many members, and where they find each other.

    Attributes:
        now: the strategy at work in the present period.
        changes: the last thousand periods that this member has come to after its first.

    Raises:
        AttachError: this replica does not train what the others train.
        PeerLost: there are too few members, or no store.
    """

    now: AtWork
    choice = None

    def __init__(self, spec: AttachSpec, given: Members) -> None:
        self._spec, self._given = spec, given
        self.changes: deque[PeriodChange] = deque(maxlen=1000)
        self._says: Callable[[], Mapping[str, Any]] = dict
        self._said: Mapping[str, Any] = {}
        self._group: dist.ProcessGroup | None = None
        self._metrics: list[Mapping[str, float]] = []
        self._waits, self._ended = "", False
        self._error: BaseException | None = None
        self._unacted = self._counted = self._averaged = False
        self._failures = self._lost = 0
        self._sent = 0, 0
        """How many rounds are finished, and after how many steps the last one was."""
        self._preemption, self._begun = Preemption(), False
        self._gradients: StepGradients | None = None
        self._alone_after = any(level.subject == "delta" for level in spec.strategy.levels)
        shards = 1 if spec.sharded is None else spec.sharded.shards
        self._ranks = ReplicaRanks(shards, spec.time_limit + timedelta(seconds=given.patience))
        calls = self._life, self._called, self._leave_if_preempted
        self.roster = Roster(given, self._ranks, *calls, way_of(given))
        self._alone = TimeAlone(self.roster, given.patience)
        self._handles: list[StepsHandle] = []
        try:
            self.roster.begin(trained(spec))
            self._warm_up()
            self._enter(None, acted=True)
            self._finish_step()
        except BaseException:
            self.roster.leave(calls=True)
            raise
        self._handles = [before_steps(self._stepping), after_steps(self._stepped)]
        self._preemption.listen()

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
        return self.now.levels[-1].session.step + self._unacted

    @property
    def _rounds(self) -> int:
        """How many rounds are finished."""
        return sum(level.session.round for level in self.now.levels)

    def _life(self) -> dict[str, Any]:
        levels = self.now.levels if hasattr(self, "now") else []
        rounds, step = [level.session.pending for level in levels], self._step if levels else 0
        return {
            "step": step,
            "waits": self._waits,
            "says": self._said,
            "begun": sum(each.begun for each in rounds),
            "in_round": any(each.by_bucket for each in rounds),
            "unsent": max(0, step - self._sent[1]),
        }

    def _called(self) -> None:
        """End what is under way; called in the roster's thread."""
        error = MembersChange("the members change")
        for level in self.now.levels if hasattr(self, "now") else ():
            level.session.failure.fail(error)
            level.transport.abort(error)

    def _change(self, acted: bool, closing: bool = False) -> bool:
        """Go over into the next period. Returns whether this member takes part in it."""
        began, before = time.monotonic(), self.names
        end_under_way(self.now.levels)
        kept = carried.present(self._spec_now, self.now.levels)
        self._end_period()
        takes_part = self._enter(kept, acted, closing)
        if takes_part:
            self._failures = self._failures + 1 if self.names == before else 0
            self.changes.append(PeriodChange(self.number, self.names, time.monotonic() - began))
        return takes_part

    def _end_period(self) -> None:
        if self._begun:
            self._begun = False
            self._metrics = [in_turn(self._metrics, self.now.metrics())]
            self.now.leave()
        if self._group is not None:
            disband(self._group)
            self._group = None

    def _enter(self, kept: CarriedState | None, acted: bool, closing: bool = False) -> bool:
        """Meet the others, and begin a period with them. Returns whether this member takes part in it."""
        if self._spec.sharded is not None:
            self._spec.sharded.reshard()
        while True:
            values = {} if kept is None else kept.session
            rounds, schedule = sum(values.get("rounds", ())), values.get("schedule_state", "")
            mine = MemberArrival(
                id="",
                name="",
                ready=kept is not None,
                step=values["steps"][-1] + (not acted) if values else 0,
                closing=closing,
                says=dict(self._says()),
                ranks=[RankArrival(rounds, acted, schedule=schedule)],
            )
            period = self.roster.meet(mine)
            self._lost += period.lost if kept is not None else 0
            if self.roster.place < 0:
                return False
            found = begun(partial(self._begin_period, period, kept), self.size)
            missing = any(self._ranks.any(found is None))
            if found is not None and not missing:
                taken = begun(partial(self._take, period, found, kept), self.size)  # it makes groups, too
                if not any(self._ranks.any(taken is None)):
                    return True
            self._end_period()
            self.roster.call()

    def _warm_up(self) -> None:
        """Be at work alone once: the first time takes a process long, and all others would wait for it."""
        limit = self._spec.time_limit
        alone = member_group(meeting_by(HashStore(), "alone", limit, lambda: False), 0, 1, limit)
        AtWork(replace(self._spec, members=alone), HookDispatcher(no_exchange)).leave()
        disband(alone)

    def _begin_period(self, period: Period, kept: CarriedState | None) -> CarriedState:
        """Find the others. Returns the state to go on from: this member's, or that of the source."""
        place, size, rank = self.roster.place, len(period.members), self._ranks.rank
        gives, limit = period.givers(rank), timedelta(seconds=2 * self._given.silence + 5)
        called = self.roster.called.is_set
        name = f"period/{period.number}/{rank}"
        meeting = self.roster.way.meeting(name, self.roster.name, limit, called)
        # In it only small messages travel, and a state piece by piece: one that is frozen is not waited for.
        self._group = member_group(meeting, place, size, limit)
        self._spec_now = replace(self._spec, members=self._group, timeout=self._spec.time_limit)
        dispatcher = HookDispatcher(no_exchange)
        self.now = AtWork(self._spec_now, dispatcher)
        self._begun = True
        if self._spec.strategy.levels[0].subject == "gradient":
            cap = int(self._spec.model.bucket_bytes_cap)
            self._gradients = StepGradients(dispatcher, self._spec_now.named, cap)
        self.now.hooks.act_through(self._count)
        for level in self.now.levels:
            level.session.failure.report_to(lost)
        if called():
            raise MembersChange("somebody has arrived meanwhile")
        if place in gives:
            return CarriedState.of_bytes(receive_from(gives[place], self._group, called))
        kept = kept or carried.present(self._spec_now, self.now.levels)
        for each in [each for each, giver in gives.items() if giver == place]:
            newcomer = not period.members[each].ranks[rank].round
            message = carried.with_replica(kept, self._spec_now, self.now.levels, newcomer).to_bytes()
            send_to(each, message, self._group, called)
        return kept

    def _take(self, period: Period, found: CarriedState, kept: CarriedState | None) -> CarriedState:
        """Take the state, when all ranks of this member have found one; `kept`: what this one had."""
        place, rank = self.roster.place, self._ranks.rank
        (step, self._unacted), self._error = period.reached(rank), None
        schedule = period.members[period.sources[rank]].ranks[rank].schedule
        own, late = place not in period.behind(rank), None
        if not own and not period.members[place].ready:
            late = kept  # the others have ended a round without it
        carried.take(found, self._spec_now, self.now.levels, step, self._unacted, own, late, schedule)
        if not own:
            self._sent = self._rounds, step
        if rank == 0:
            if period.number > 1 and not any(each.ready for each in period.members):
                _log.warning(
                    "all members of period %d are gone, and their state with them: training begins anew",
                    period.number - 1,
                )
            _log.warning(
                "period %d of training, with %d members: %s",
                *(period.number, self.size, ", ".join(self.names)),
            )
        return found

    # ---- before and after every step --------------------------------------------------------------------

    def _stepping(self, optimizer: Optimizer) -> None:
        """Called before a step of any optimizer: average the gradients, if that is what is exchanged."""
        if self._gradients is None or self._averaged or self._ended or optimizer not in self._spec.optimizers:
            return
        while not self._averaged:
            try:
                if self.roster.called.is_set():
                    raise MembersChange("the members change")
                self._gradients.average(self.now.levels[0].session)
            except RoundError as error:
                self._refuse_own(error)
                self._go_on(acted=True)
            else:
                self._averaged, self._failures = True, 0

    def _count(self, act: Callable[[], None]) -> None:
        """Called when a step is counted, with what follows it."""
        self._counted = True
        self._around(act)

    def _around(self, act: Callable[[], None]) -> None:
        """Do what follows a step, unless the members change."""
        self._averaged, self._said = False, self._says()
        if not self._alone_after:  # nothing is exchanged then
            act()
            return
        self._unacted = True
        if self.roster.called.is_set() or self._alone.steps:
            return
        try:
            act()
        except RoundError as error:
            self._error = error
        else:
            self._unacted, self._failures = False, 0

    def _stepped(self, _: Optimizer) -> None:
        """Called after a step of any optimizer, when all other hooks have been called."""
        if not self._counted or self._ended:
            return
        unacted, preempted = self._ranks.any(self._unacted, self._preemption.noted)
        if unacted and any(self._ranks.any(self._alone.goes_on(self._alone_after))):
            self._alone.miss(self.now.levels if self._unacted else ())
            self._unacted = False
        elif unacted:
            self._refuse_own(self._error)
            self._go_on(acted=not self._unacted)
        self._counted = False
        if self._rounds != self._sent[0]:
            self._sent = self._rounds, self._step
        if preempted:
            self._preemption.note()
        self._leave_if_preempted()

    def _go_on(self, acted: bool, closing: bool = False) -> bool:
        """Go over into another period, and end the step that its members have in hand.

        Whoever has not taken that step, as a newcomer, takes part in what follows it.

        Returns: Whether this member takes part in it.
        """
        if not self._change(acted, closing):
            return False
        return self._finish_step()

    def _finish_step(self) -> bool:
        if self._unacted:
            self._around(self.now.hooks.act_after_step)
        if any(self._ranks.any(self._unacted)):
            self._refuse_own(self._error)
            return self._go_on(acted=not self._unacted)
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
        named = self._spec.named.values()
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
        self.now.sync()
        self._average_buffers()

    def _end_now(self) -> None:
        self.now.make_equal()
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
        for level in self.now.levels:
            if level.progress is not None and not level.strategy.topology.mixes:
                level.progress.go_to_anchor()

    def _together(self, what: str, call: Callable[[], None], closing: bool) -> bool:
        """Make a collective call once all members wait for it. Returns False if others have gone on."""
        while True:
            self._leave_if_preempted()
            if any(self._ranks.any(self.roster.called.is_set() or self.now.failures.first is not None)):
                if not self._go_on(acted=True, closing=closing):
                    return False
                continue
            together = self._ranks.first(lambda: self.roster.all_wait(what))
            if together is None:
                time.sleep(BEAT / 2)
                continue
            if not together:
                return False
            failed: RoundError | None = None
            try:
                call()
            except RoundError as error:
                failed = error
            if not any(self._ranks.any(failed is not None)):
                return True
            self._refuse_own(failed)
            self._go_on(acted=True, closing=closing)

    def leave(self) -> None:
        """As `AtWork.leave`; the other members go on."""
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._preemption.close()
            self.roster.leave(calls=not self._ended)
            self._ended = True
            self.now.leave()
            if self._group is not None:
                disband(self._group)
                self._group = None

    # ---- what it reports --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """As `AtWork.metrics`, of all periods; and `members`, `period`, `changes`, and `lost_steps`.

        These are the steps that others had taken since their last rounds when they died or left.
        """
        numbers = in_turn(self._metrics, self.now.metrics())
        members = {"members": self.size, "period": self.number, "changes": len(self.changes)}
        return {**numbers, **members, "steps": float(self._step), "lost_steps": self._lost}

    def timeline(self) -> Timeline:
        """As `AtWork.timeline`, of the present period."""
        return self.now.timeline()

    @property
    def active_path(self) -> str:
        """What runs, in one sentence."""
        return f"{self.now.active_path}; member {self.place} of {self.size} in period {self.number}"

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
