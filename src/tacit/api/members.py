"""The session of a replica among members that come and go."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from tacit.api.attached import Attached
from tacit.api.member_changes import PeriodChange
from tacit.api.members_at_work import MembersAtWork
from tacit.attaching.member_requirements import member_specs
from tacit.attaching.requirements import fitted
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.members.roster import Members


class MemberSession(Attached):
    """A session whose replicas may join, leave and die while training goes on.

    Args:
        spec: the arguments of the user's `attach`.
        members: how many there may be, and where they find each other.

    Raises:
        AttachError: the strategy or the model does not fit, or this replica trains something else.
        PeerLost: there are too few members, or no store.
    """

    def __init__(self, spec: AttachSpec, members: Members) -> None:
        self._members = members
        # A member whose scaler skips a step has not taken it: it takes the next one in its place.
        self._specs = [replace(fitted(each), scaler=None) for each in member_specs(spec, members)]
        super().__init__(replace(self._specs[0], model=spec.model, optimizers=spec.optimizers))

    def _begun(self, spec: AttachSpec) -> MembersAtWork:
        self._membership = MembersAtWork(self._specs, self._members)
        return self._membership

    @property
    def _labels(self) -> dict[str, str]:
        return {**super()._labels, "member": self._membership.roster.name}

    @property
    def levels(self) -> list[Level]:
        """The levels of the strategy, of each shard that this process has."""
        return self._membership.levels

    @property
    def step(self) -> int:
        """How many steps the members have taken: a newcomer begins where the others are."""
        return self.levels[-1].session.step

    @property
    def members(self) -> MembersAtWork:
        """The members of the present period; what a `MemberSampler` takes."""
        return self._membership

    @property
    def changes(self) -> tuple[PeriodChange, ...]:
        """The periods that this member has come to after its first one."""
        return tuple(self._membership.changes)

    def sync(self) -> None:
        """Make all replicas equal, when all members have called it after the same step.

        Raises:
            RoundError: others have gone on without it.
        """
        if not self.closed:
            self._membership.sync()

    def leave(self) -> None:
        """Leave the others, who go on; the model gets the parameters on which all last agreed."""
        if not self.closed:
            self._membership.go_to_common_point()
            self._leave()

    def end(self, where: str, error: BaseException | None) -> None:
        """Leave the others at the end of a program that has not closed the session."""
        with suppress(Exception):
            self._leave()

    def close(self) -> None:
        """Make all replicas equal if all members close after the same step; else leave as `leave` does."""
        if not self.closed:
            try:
                self._membership.make_equal()
            finally:
                self._leave()
