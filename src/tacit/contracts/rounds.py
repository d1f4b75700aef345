"""WHEN replicas exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from tacit.contracts.common import ScheduleState


class Rounds(ABC):
    """WHEN. Pure in (step, memory), so that every rank decides alike."""

    needs: ClassVar[frozenset[str]] = frozenset()
    """What must be known of the training: "steps_per_epoch", "epochs". It stands in the memory."""
    late: ClassVar[bool] = False
    """Whether `lands` says when answers are applied. A round then leaves before the answer that lands with it
    is applied."""
    follows: ClassVar[bool] = False
    """Whether it goes by what the rounds of the farthest level remember."""

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The facts that `observe` is to be told: "loss", "drift", "transfer"."""
        return frozenset()

    @property
    def parts(self) -> int:
        """How many parts the model is cut into, each with rounds of its own."""
        return 1

    def start(self, step: int = 0) -> ScheduleState:
        """What is remembered before the step with which it begins."""
        return {}

    @abstractmethod
    def due(self, step: int, schedule_state: ScheduleState, part: int = 0) -> bool:
        """Whether a round of the part follows the attempt number `step` (counted from 0) of the optimizer."""

    def inactive(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether another level still keeps the replicas equal in this step: there is nothing to do."""
        return False

    def apply_at(self, step: int, schedule_state: ScheduleState) -> int:
        """The step after which the answer of the round of `step` is applied, where it is `late`."""
        return step

    def round_index(self, step: int, schedule_state: ScheduleState) -> int | None:
        """Whose turn the round of `step` is; None: of the next one."""
        return None

    def phases(self, schedule_state: ScheduleState) -> tuple[tuple[int, bool], ...]:
        """Stretches of steps in which all answers come at once (False), or late (True); the last goes on.

        None where there is no such difference.
        """
        return ()

    def diverged_in_node(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether replicas of one node may differ after this step, as the nearest level does not meet."""
        return False

    def asks(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether `observe` is to be called after the round of `step`."""
        return bool(self.observed_metrics)

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """What is remembered after a step in which a round left, where it `asks`.

        `facts` are means over the ranks: "step", which the round followed; "lr"; "loss", of the steps since
        the facts before; "drift", the mean squared distance of a replica from the mean of all, before the
        round. Of "transfer", for how many steps a late round was on its way, the largest is taken.
        """
        return schedule_state
