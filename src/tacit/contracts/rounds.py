"""When replicas exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from tacit.contracts.common import ScheduleState


class Sync(NamedTuple):
    """A round that starts after a step.

    Attributes:
        apply_at: the step after which its answer is applied; the same step: at once.
        round_index: rises from round to round; selects the rank of a node that sends between nodes, for
            topologies that do this in turn. None: the number of the session's rounds so far.
        observe: whether `AdaptiveRounds.observe` is to be called for it.
        diverged_in_node: whether replicas of one node may differ, as the level inside nodes does not exchange
            in every step.
    """

    apply_at: int
    round_index: int | None = None
    observe: bool = False
    diverged_in_node: bool = False


class Rounds(ABC):
    """When replicas exchange. Pure functions of (step, schedule state): all ranks get the same result."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """Keys that it needs in the schedule state: "steps_per_epoch", "epochs"."""

    for_gradients: ClassVar[bool] = False
    """Whether gradients may be exchanged by them, as none is lost in steps that no round follows."""
    every_step: ClassVar[bool] = False
    """Whether a round follows every step that has to have one for replicas to stay equal."""
    always: ClassVar[bool] = False
    """Whether a round follows every step, and is applied at once, whatever the schedule state."""
    phased: ClassVar[bool] = False
    """Whether answers are applied at once in some phases of training, and late in others. A round starts
    before an answer that is due after the same step is applied."""
    sync_every: int | None = None
    """The period in steps, where there is one that does not change."""
    fragments: int = 1
    """The number of parts of the model, each with separate rounds."""
    start_step: int = 0
    """The first step in which replicas step alone; before it another level keeps them equal."""

    @property
    def follows(self) -> Rounds | None:
        """The rounds of the farthest level, where these depend on their schedule state."""
        return None

    @property
    def skips(self) -> bool:
        """Whether they leave out steps that have to have a round for replicas to stay equal."""
        return not self.every_step

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The metrics that `AdaptiveRounds` depend on; empty: they do not depend on measurements."""
        return frozenset()

    @property
    def summary(self) -> str:
        """A few words on when there is a round."""
        return f"by {type(self).__name__}"

    def start(self, step: int = 0) -> ScheduleState:
        """The schedule state of a training that begins with this step."""
        return {}

    @abstractmethod
    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """The round of this part after attempt number `step` (from 0) of the optimizer; None: there is none.

        Its `apply_at` does not include the delay of an `Overlap`.
        """

    def sync(self, step: int, schedule_state: ScheduleState) -> Sync:
        """The round after this step, also if none is due, as for `session.sync()`."""
        return Sync(step)

    def phases(self, schedule_state: ScheduleState) -> tuple[tuple[int, bool], ...]:
        """(number of steps, whether answers are applied late) of each phase; the last goes on."""
        return ()


class AdaptiveRounds(Rounds):
    """Rounds that depend on measurements of the training."""

    @property
    @abstractmethod
    def observed_metrics(self) -> frozenset[str]:
        """The metrics that `observe` needs: at least one of "loss", "drift", "transfer" and "lr"."""

    @abstractmethod
    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """The new schedule state after a round whose `Sync` has `observe`.

        `facts` are means over the ranks: "step", after which the round started; "loss", since the last call;
        "drift", the mean squared distance of a replica from the mean of all, before the round; and the
        largest "lr" and "transfer": the learning rate, and the steps that a late round took.
        """
