"""A strategy at work on one shard of a replica, in one period of the membership after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from tacit.api.at_work import AtWork
from tacit.api.member_changes import MembersChange, end_under_way, lost
from tacit.checkpoint import carried
from tacit.checkpoint.carried import CarriedState
from tacit.errors import RoundError
from tacit.gradients.before_step import StepGradients
from tacit.gradients.ddp_hook import HookDispatcher, no_exchange
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.members.record import Period, RankArrival
from tacit.members.roster import Roster
from tacit.session import in_turn
from tacit.transports.member_links import meeting_by, receive_from, send_to
from tacit.transports.process_groups import disband, groups_of, member_group

Count = Callable[["ShardAtWork", Callable[[], None]], None]


class ShardAtWork:
    """A shard's strategy, with a process group of the members in each period; its state is carried on.

    Args:
        spec: the arguments of `attach` for this shard; checked.
        number: the shard's; 0 where the replica is not sharded.
        count: called when a step is counted, with this object and what follows that step.

    Attributes:
        now: the strategy at work in the present period.
        gradients: averages them between backward and step, if that is what is exchanged.
        unacted: whether what follows the last step is still to come.
        error: why.
        kept: the state from the period before, until there is one of the present period.
    """

    now: AtWork

    def __init__(self, spec: AttachSpec, number: int, count: Count) -> None:
        self.spec, self.number, self._count = spec, number, count
        self.gradients: StepGradients | None = None
        self.unacted = False
        self.error: BaseException | None = None
        self.kept: CarriedState | None = None
        self._group: dist.ProcessGroup | None = None
        self._found: CarriedState | None = None
        self._unacted_then = False
        self._metrics: list[Mapping[str, float]] = []
        self._begun = False

    @property
    def levels(self) -> list[Level]:
        """The levels in the present period; none before the first."""
        return self.now.levels if hasattr(self, "now") else []

    @property
    def rounds(self) -> int:
        """How many rounds are finished."""
        return sum(level.session.round for level in self.levels)

    def metrics(self) -> dict[str, float]:
        """As `AtWork.metrics`, of all periods."""
        return in_turn(self._metrics, self.now.metrics())

    def warm_up(self) -> None:
        """Be at work alone once: the first time takes a process long, and all others would wait for it."""
        limit = self.spec.time_limit
        alone = member_group(meeting_by(None, "alone", limit, lambda: False), 0, 1, limit)
        AtWork(replace(self.spec, members=alone), self._dispatcher()).leave()
        disband(alone)

    # ---- what follows a step ----------------------------------------------------------------------------

    def put_off(self) -> None:
        """Note that what follows the last step is still to come."""
        self.unacted = True

    def act(self, act: Callable[[], None]) -> bool:
        """Do what follows the last step. Returns whether that was possible."""
        try:
            act()
        except RoundError as error:
            self.error = error
            return False
        self.unacted = False
        return True

    def miss(self) -> None:
        """Have nothing follow the last step."""
        self.unacted, self.error = False, None

    # ---- from one period to the next --------------------------------------------------------------------

    def stop(self) -> None:
        """End what is under way, and keep the state."""
        end_under_way(self.levels)
        self.kept = carried.present(self.now.spec, self.levels)

    def arrival(self) -> RankArrival:
        """What members are told of this shard."""
        values = {} if self.kept is None else self.kept.session
        rounds, schedule = sum(values.get("rounds", ())), values.get("schedule_state", "")
        return RankArrival(rounds, not self.unacted, schedule=schedule)

    def begin(self, period: Period, roster: Roster, silence: float) -> bool:
        """Find the others, and the state to go on from: this member's, or that of the source. Returns True.

        Raises:
            RuntimeError: one of them is gone; or a RoundError.
        """
        place, size = roster.place, len(period.members)
        gives, limit = period.givers(self.number), timedelta(seconds=2 * silence + 5)
        called = roster.called.is_set
        name = f"period/{period.number}/{self.number}"
        meeting = roster.way.meeting(name, roster.name, limit, called, roster.ask)
        # In it only small messages travel, and a state piece by piece: one that is frozen is not waited for.
        self._group = member_group(meeting, place, size, limit)
        weights = [each.weight for each in period.members]
        spec = replace(self.spec, members=self._group, timeout=self.spec.time_limit, weights=weights)
        dispatcher = self._dispatcher()
        self.now = AtWork(spec, dispatcher)
        self._begun = True
        if dispatcher is not None:
            self.gradients = StepGradients(dispatcher, spec.named, spec.bucket_bytes_cap)
        self.now.hooks.act_through(partial(self._count, self))
        for level in self.levels:
            level.session.failure.report_to(lost)
        if called():
            raise MembersChange("somebody has arrived meanwhile")
        groups = groups_of(self._group)
        if place in gives:
            self._found = CarriedState.of_bytes(receive_from(gives[place], groups, called))
            return True
        self._found = self.kept or carried.present(spec, self.levels)
        for each in [each for each, giver in gives.items() if giver == place]:
            newcomer = not period.members[each].ranks[self.number].round
            message = carried.with_replica(self._found, spec, self.levels, newcomer).to_bytes()
            send_to(each, message, groups, called)
        return True

    def take(self, period: Period, place: int) -> bool:
        """Take the state that was found, when all shards of this member have found one. Returns True.

        Raises:
            RuntimeError: one of the others is gone; or a RoundError.
        """
        assert self._found is not None
        step, unacted = period.reached(self.number)
        schedule = period.members[period.sources[self.number]].ranks[self.number].schedule
        own, late = place not in period.behind(self.number), None
        if not own and not period.members[place].ready:
            late = self.kept  # the others have ended a round without it
        carried.take(self._found, self.now.spec, self.levels, step, unacted, own, late, schedule)
        self._unacted_then = unacted
        return True

    def go_on(self) -> None:
        """Go on from the state that was taken, as all shards of this member have taken theirs."""
        self.kept, self._found, self.error = None, None, None
        self.unacted = self._unacted_then

    def end(self) -> None:
        """End the present period."""
        if self._begun:
            self._begun = False
            self._metrics = [self.metrics()]
        self.leave()

    def leave(self) -> None:
        """As `AtWork.leave`, with the period's process group."""
        if hasattr(self, "now"):
            self.now.leave()
        if self._group is not None:
            disband(self._group)
            self._group = None

    def to_common_point(self) -> None:
        """Give the model the parameters on which all members last agreed."""
        for progress in carried.common_points(self.levels, self.levels[0].session.step).values():
            progress.go_to_anchor()

    def _dispatcher(self) -> HookDispatcher | None:
        """What answers for gradients, if they are exchanged: they are between backward and step."""
        gradients = self.spec.strategy.levels[0].subject == "gradient"
        return HookDispatcher(no_exchange) if gradients else None
