"""WHEN replicas exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from tacit.contracts.common import ScheduleState


class Sync(NamedTuple):
    """A round that leaves after a step.

    Attributes:
        apply_at: the step after which its answer is applied; the same step: at once.
        round_index: which rank of a node takes it between the nodes, counted up from round to round, for
            topologies that do this in turn; None: the number of the session's rounds so far.
        observe: whether `AdaptiveRounds.observe` is to be called for it.
        diverged_in_node: whether the replicas of one node may differ, as the nearest level does not exchange
            in every step.
    """

    apply_at: int
    round_index: int | None = None
    observe: bool = False
    diverged_in_node: bool = False


class Rounds(ABC):
    """WHEN. Pure in (step, schedule state), so that every rank decides alike."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """What must be known of the training: "steps_per_epoch", "epochs". It is in the schedule state."""

    for_gradients: ClassVar[bool] = False
    """Whether gradients may be exchanged by them, as none is lost in steps that no round follows."""
    every_step: ClassVar[bool] = False
    """Whether a round follows every step that has to have one for replicas to stay equal."""

    @property
    def summary(self) -> str:
        """When, in a few words."""
        return f"by {type(self).__name__}"

    def start(self, step: int = 0) -> ScheduleState:
        """The schedule state before the step with which it begins."""
        return {}

    @abstractmethod
    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """The round of the part that follows attempt number `step` (from 0) of the optimizer, if one does.

        What an `Overlap` adds to `apply_at` is not in it.
        """


class AdaptiveRounds(Rounds):
    """Rounds that change with what training shows."""

    @property
    @abstractmethod
    def observed_metrics(self) -> frozenset[str]:
        """What `observe` needs, at least one of "loss", "drift" and "transfer"."""

    @abstractmethod
    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """The schedule state after a step in which a round left, where its `Sync` asks for it.

        `facts` are means over the ranks: "step", which the round followed; "lr"; "loss", of the steps since
        the facts before; "drift", the mean squared distance of a replica from the mean of all, before the
        round. Of "transfer", for how many steps a late round was on its way, the largest is taken.
        """


class PhasedRounds(Rounds):
    """Rounds whose answers are applied at once in some phases of training, and late in others.

    A round then leaves before the answer that is applied after the same step is applied.
    """

    @abstractmethod
    def phases(self, schedule_state: ScheduleState) -> tuple[tuple[int, bool], ...]:
        """Stretches of steps in which all answers come at once (False), or late (True); the last goes on."""

    @abstractmethod
    def sync(self, step: int, schedule_state: ScheduleState) -> Sync:
        """How a round after this step goes, whether or not one is due: `session.sync()` makes others too."""


class PeriodicRounds(Rounds):
    """Rounds of one period.

    Attributes:
        sync_every: the period, in steps.
        fragments: how many parts the model is cut into, each with rounds of its own.
        start_step: the step with which replicas begin to move on their own: another level keeps them equal
            before.
    """

    sync_every: int
    fragments: int
    start_step: int


class FollowingRounds(Rounds):
    """Rounds that go by the schedule state of the farthest level.

    Attributes:
        schedule: the rounds of that level.
    """

    schedule: Rounds
