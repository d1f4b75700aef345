"""Rounds at steps that are known in advance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tacit.contracts import Momentum, Rounds, ScheduleState, Sync
from tacit.errors import ConfigError
from tacit.rounds.bounds import check


@dataclass(frozen=True)
class EveryStep(Rounds):
    """A round after every attempt of the optimizer: synchronous training."""

    for_gradients: ClassVar[bool] = True
    every_step: ClassVar[bool] = True
    always: ClassVar[bool] = True

    @property
    def summary(self) -> str:
        return "every step"

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync:
        """A round, applied at once."""
        return Sync(step)


@dataclass(frozen=True)
class Until(Rounds):
    """A round after each of the first `stop` attempts, none later: another level then takes over."""

    for_gradients: ClassVar[bool] = True

    stop: int

    def __post_init__(self) -> None:
        check("stop", self.stop, 1)

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """A round in steps 0 to `stop` - 1."""
        return Sync(step) if step < self.stop else None


@dataclass(frozen=True)
class Renewals:
    """The steps in which Adam's variance moves, by mean gradients; in all others it is kept.

    Write it as `variance` of deltas, and `During` it as `rounds` of the gradients of a nearer level. They are
    the first `freeze_step` steps; then, `refresh` at a time, from 1.5, 1.5^2, 1.5^3 ... times that on, where
    the variance has been kept as long before (after 0/1 Adam: Lu et al., ICLR 2023, arXiv 2202.06009).

    Attributes:
        freeze_step: the number of attempts of the optimizer, 1 or more, after which the variance is first
            kept.
        refresh: how many steps each renewal takes; 0: there is none.
    """

    freeze_step: int = 500
    refresh: int = 20

    def __post_init__(self) -> None:
        check("freeze_step", self.freeze_step, 1)
        check("refresh", self.refresh, 0)

    def moves(self, step: int) -> bool:
        """Whether the variance moves in this step, counted from 0."""
        return not Momentum(0, freeze_step=self.freeze_step, refresh=self.refresh).keeps_variance(step)


@dataclass(frozen=True)
class During(Rounds):
    """A round after each attempt in which Adam's variance moves."""

    for_gradients: ClassVar[bool] = True

    renewals: Renewals = Renewals()

    @property
    def summary(self) -> str:
        """A few words on the first steps, and on how many follow at a time."""
        refresh = self.renewals.refresh
        later = f", then {refresh} at a time" if refresh else ""
        return f"in the first {self.renewals.freeze_step} steps{later}"

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """A round in the steps in which the variance moves."""
        return Sync(step) if self.renewals.moves(step) else None


@dataclass(frozen=True)
class Every(Rounds):
    """A round after every `sync_every`-th attempt. Larger sends less, and lets replicas drift further.

    Attributes:
        sync_every: the period K, in steps.
        fragments: the number of parts of the model, each with a round every K steps, staggered: one of
            them every K / `fragments` steps (Streaming DiLoCo: Douillard et al. 2025).
        start_step: the step from which periods are counted; before it another level keeps replicas equal.
    """

    sync_every: int
    fragments: int = 1
    start_step: int = 0

    def __post_init__(self) -> None:
        check("sync_every", self.sync_every, 1)
        check("fragments", self.fragments, 1)
        check("start_step", self.start_step, 0)
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments={self.fragments} do not fit into sync_every={self.sync_every} steps: "
                "write no more fragments than steps"
            )

    @property
    def summary(self) -> str:
        """The period, and the start if it is not the first step."""
        start = f" from step {self.start_step}" if self.start_step else ""
        return f"every {f'{self.sync_every} steps' if self.sync_every > 1 else 'step'}{start}"

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """After K, 2K, ... steps from the start; of N fragments, part p is earlier by K - (p + 1) K / N."""
        done = step + 1 - self.start_step
        offset = (part + 1) * self.sync_every // self.fragments
        return Sync(step) if done > 0 and (done - offset) % self.sync_every == 0 else None


@dataclass(frozen=True)
class EveryEpoch(Rounds):
    """A round once an epoch, after its last step."""

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch"})

    @property
    def summary(self) -> str:
        return "every epoch"

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """After steps S - 1, 2S - 1, ... (counted from 0), of S steps an epoch."""
        return Sync(step) if (step + 1) % int(schedule_state["steps_per_epoch"]) == 0 else None


@dataclass(frozen=True)
class MomentPeriods:
    """How often the optimizer's state is averaged, densely (DES-LOC: Iacob et al. 2025, arXiv 2505.22549).

    Steps are attempts of the optimizer, whether or not a round of the parameters follows them. As the session
    closes all of it is averaged once more.

    Attributes:
        first_every: steps from one average of momentum, or of Adam's first moment, to the next; K_u.
        second_every: of Adam's second moment, and of other means and sums of squares; K_v.
    """

    first_every: int
    second_every: int

    def __post_init__(self) -> None:
        check("first_every", self.first_every, 1)
        check("second_every", self.second_every, 1)
