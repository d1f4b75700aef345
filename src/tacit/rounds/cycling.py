"""DASO's schedule: rounds applied at once, rounds applied late, and periods that change with the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from tacit.contracts import AdaptiveRounds, Rounds, ScheduleState, Sync
from tacit.errors import ConfigError
from tacit.rounds.adaptive import plateau
from tacit.rounds.bounds import check, check_share

SLACK = 1.1
"""A transfer may take this many times the measured time and still be hidden, where the period is chosen."""
PROBES = 2
"""Late rounds measured one by one; afterwards the period is chosen only at the ends of epochs."""


@dataclass(frozen=True)
class Cycling(AdaptiveRounds):
    """Warm-up, cycling and cool-down of DASO (Coquelin et al. 2021, arXiv 2104.05588, sections 3.2 and 3.3).

    In the first and last epochs a round follows every step, and is applied at once. In between, one starts
    every B steps, and its answer is applied W steps later; every epoch ends with a round that is applied at
    once. Batches are counted within the epoch. When the loss of an epoch has stopped falling, B and L are
    divided by `skip_reduction_factor` and W decreases by 1; if B is 1 already, B becomes `most`, and W and L
    become `most` / `local_skip_factor`. The first loss that is compared is that of the last warm-up epoch.

    An answer that would be applied one step before the next round starts is applied with that round (as in
    the authors' code): with B = 2 and W = 1 the lag is 2. It is then weighted by its actual lag.

    Its state: "period", B; "delay", W; "local", L; "parted", whether L has been above 1; "best" and "bad",
    of the loss; "asked".

    Attributes:
        period: B at first. "auto": the least for which the transfers are hidden, from how long they take and
            how long steps take; an answer is applied as the next round starts. The loss has no effect.
        delay: W at first; below B, or both are 1.
        local: L: while cycling, the replicas of a node average gradients in every L-th step only, from when
            an answer has been applied until the next round starts.
        most: B after the reset.
        warmup_epochs: None: a tenth of the epochs, and 4 at most. The same for `cooldown_epochs`.
        patience: how many epochs in a row may pass without improvement before it counts as a plateau.
        threshold: by what share the loss must fall below the best to count as improved, from 0 to below 1.
        skip_reduction_factor: what B and L are divided by on a plateau, 2 or more.
        local_skip_factor: how many times W and L are smaller than B after the reset, 2 or more. This and
            `skip_reduction_factor` have the names that they have in the authors' code; the text form of
            `daso` does not take them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch", "epochs"})
    phased: ClassVar[bool] = True

    period: int | Literal["auto"] = 4
    delay: int = 1
    local: int = 1
    most: int = 8
    warmup_epochs: int | None = None
    cooldown_epochs: int | None = None
    patience: int = 2
    threshold: float = 0.05
    skip_reduction_factor: int = 2
    local_skip_factor: int = 4

    def __post_init__(self) -> None:
        if self.period != "auto":
            check("period", self.period, 1)
            check("delay", self.delay, 1)
            if self.delay >= max(2, self.period):
                raise ConfigError(
                    f"delay={self.delay} with period={self.period}: answers would be applied after the next "
                    f"round starts. Write delay={max(1, self.period - 1)} at most, or a longer period"
                )
        elif (self.delay, self.local) != (1, 1):
            raise ConfigError(
                f"period='auto' sets when answers are applied, but delay={self.delay}, local={self.local} "
                "were given: leave them out, or give the period as a number"
            )
        for name in ("local", "most"):
            check(name, getattr(self, name), 1)
        for name in ("warmup_epochs", "cooldown_epochs"):
            if getattr(self, name) is not None:
                check(name, getattr(self, name), 0)
        check("patience", self.patience, 0)
        check("skip_reduction_factor", self.skip_reduction_factor, 2)
        check("local_skip_factor", self.local_skip_factor, 2)
        check_share("threshold", self.threshold)

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The loss; with period="auto" the "transfer", the steps that a transfer takes."""
        return frozenset({"transfer" if self.period == "auto" else "loss"})

    def start(self, step: int = 0) -> ScheduleState:
        """The first B, W and L."""
        if self.period == "auto":
            return {"period": 4.0, "delay": 4.0, "local": 1.0, "asked": 0.0}
        return {
            "period": float(self.period),
            "delay": float(self.delay),
            "local": float(self.local),
            "parted": float(self.local > 1),
        }

    # ---- phases ---------------------------------------------------------------------------------------

    def _epochs(self, schedule_state: ScheduleState) -> tuple[int, int]:
        """The epoch in which cycling begins, and the one before which it ends."""
        total = int(schedule_state["epochs"])
        few = min(4, total // 10)
        warm = few if self.warmup_epochs is None else self.warmup_epochs
        cool = few if self.cooldown_epochs is None else self.cooldown_epochs
        return warm, max(warm, total - cool)

    def phases(self, schedule_state: ScheduleState) -> tuple[tuple[int, bool], ...]:
        """Warm-up, cycling, cool-down: only answers of cycling are late."""
        (warm, cool), steps = self._epochs(schedule_state), int(schedule_state["steps_per_epoch"])
        return (warm * steps, False), ((cool - warm) * steps, True), (steps, False)

    def _blocks(self, step: int, schedule_state: ScheduleState) -> bool:
        warm, cool = self._epochs(schedule_state)
        return not warm <= step // int(schedule_state["steps_per_epoch"]) < cool

    def _batch(self, step: int, schedule_state: ScheduleState) -> tuple[int, int]:
        """The index of the batch in its epoch, and that of the last one."""
        steps = int(schedule_state["steps_per_epoch"])
        return step % steps, steps - 1

    # ---- when -----------------------------------------------------------------------------------------

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """In every B-th batch of an epoch, from the first on, and in its last one; else in every step."""
        k, last = self._batch(step, schedule_state)
        due = self._blocks(step, schedule_state) or k == last or k % int(schedule_state["period"]) == 0
        return self.sync(step, schedule_state) if due else None

    def sync(self, step: int, schedule_state: ScheduleState) -> Sync:
        """The round after this step; replicas of a node may differ once L has been above 1."""
        return Sync(
            self._apply_at(step, schedule_state),
            self._round_index(step, schedule_state),
            self._observes(step, schedule_state),
            bool(schedule_state.get("parted")),
        )

    def _apply_at(self, step: int, schedule_state: ScheduleState) -> int:
        """W batches later, or with the next round if that is only one batch further."""
        k, last = self._batch(step, schedule_state)
        if self._blocks(step, schedule_state) or k == last:
            return step
        period, delay = int(schedule_state["period"]), int(schedule_state["delay"])
        following = period - k % period
        return step + min(following if following <= delay + 1 and period > 1 else delay, last - k)

    def _round_index(self, step: int, schedule_state: ScheduleState) -> int:
        """The number of rounds in the epoch before this one."""
        k, _ = self._batch(step, schedule_state)
        return k if self._blocks(step, schedule_state) else math.ceil(k / schedule_state["period"])

    def averages_in_node(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether the replicas of a node average their gradients in this step."""
        k, last = self._batch(step, schedule_state)
        local = int(schedule_state["local"])
        if local == 1 or k == last or self._blocks(step, schedule_state):
            return True
        since = k % int(schedule_state["period"]) - int(schedule_state["delay"])
        return k % int(schedule_state["period"]) == 0 or since <= 0 or since % local == 0

    # ---- periods that change --------------------------------------------------------------------------

    def _observes(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether an epoch ends; with period="auto" also for the first late rounds."""
        k, last = self._batch(step, schedule_state)
        probes = (
            k > 0 and not self._blocks(step, schedule_state) and schedule_state.get("asked", PROBES) < PROBES
        )
        return k == last or probes

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """After a cycling epoch: divide on a plateau. With period="auto": choose the period.

        The loss of the last warm-up epoch counts, as in the authors' code; those of other epochs with rounds
        applied at once do not.
        """
        step = int(facts["step"])
        if self._blocks(step, schedule_state) and (
            self.period == "auto" or not self._warmed_up(step, schedule_state)
        ):
            return schedule_state
        if self.period == "auto":
            return self._chosen(schedule_state, facts["transfer"])
        flat, schedule_state = plateau(schedule_state, facts["loss"], self.patience, self.threshold)
        if not flat:
            return schedule_state
        if schedule_state["period"] == 1:
            return self._begun_again(schedule_state)
        period = max(1.0, schedule_state["period"] // self.skip_reduction_factor)
        delay = max(1.0, min(schedule_state["delay"] - 1, period - 1))
        local = max(1.0, schedule_state["local"] // self.skip_reduction_factor)
        return {**schedule_state, "period": period, "delay": delay, "local": local}

    def _warmed_up(self, step: int, schedule_state: ScheduleState) -> bool:
        """Whether cycling starts with the next step."""
        warm, cool = self._epochs(schedule_state)
        return step + 1 == warm * int(schedule_state["steps_per_epoch"]) and warm < cool

    def _begun_again(self, schedule_state: ScheduleState) -> ScheduleState:
        part = float(max(1, self.most // self.local_skip_factor))
        diverged_in_node = max(schedule_state["parted"], float(part > 1))
        return {
            **schedule_state,
            "period": float(self.most),
            "delay": part,
            "local": part,
            "parted": diverged_in_node,
        }

    def _chosen(self, schedule_state: ScheduleState, transfer: float) -> ScheduleState:
        schedule_state = {**schedule_state, "asked": schedule_state["asked"] + 1}
        if transfer <= 0:  # no late round has been measured
            return schedule_state
        period = float(max(1, math.ceil(transfer * SLACK)))
        return {**schedule_state, "period": period, "delay": period}


@dataclass(frozen=True)
class NodeRounds(Rounds):
    """Rounds inside a node: its replicas average gradients where `schedule`, that between nodes, says so."""

    for_gradients: ClassVar[bool] = True
    every_step: ClassVar[bool] = True

    schedule: Cycling

    @property
    def follows(self) -> Rounds:
        """The schedule between the nodes."""
        return self.schedule

    @property
    def skips(self) -> bool:
        """Whether replicas of a node drift apart between two rounds, as L is above 1."""
        return self.schedule.local > 1

    @property
    def summary(self) -> str:
        """A few words on the steps that have to have a round."""
        return "every step"

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """A round if the schedule averages gradients inside the nodes in this step."""
        return Sync(step) if self.schedule.averages_in_node(step, schedule_state) else None
