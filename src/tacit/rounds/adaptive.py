"""Periods that depend on measurements of the training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tacit import checks
from tacit.contracts import AdaptiveRounds, ScheduleState, Sync
from tacit.rounds.bounds import check, check_share


@dataclass(frozen=True)
class _Adaptive(AdaptiveRounds):
    """A changing period. Its state: "period", and "last", the number of steps up to the last round."""

    sync_every: int

    def __post_init__(self) -> None:
        check("sync_every", self.sync_every, 1)

    def start(self, step: int = 0) -> ScheduleState:
        """A state with the first period."""
        return {"period": float(self.sync_every), "last": float(step)}

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """A round once `period` steps have passed since the last one."""
        due = step + 1 - schedule_state["last"] >= schedule_state["period"]
        return Sync(step, observe=True) if due else None


@dataclass(frozen=True)
class AdaComm(_Adaptive):
    """A period that shrinks with the loss (AdaComm: Wang & Joshi, SysML 2019, arXiv 1810.08313).

    After each interval l:    tau_l = ceil(sqrt(lr_0 / lr_l * F_l / F_0) * tau_0),
    and where that is not smaller than the period was: half of it, rounded up.

    F_0 is the loss over the steps before the first round, F_l over those before the interval's end; the
    paper takes the loss at the point itself. The interval is in steps, where the paper has 60 seconds.
    lr_0 is the initial learning rate, which in the paper is the largest one. Where a warm-up precedes it,
    lr_0 is the largest rate so far, and intervals are counted from when the rate no longer rises.

    Attributes:
        sync_every: the first period, tau_0.
        interval: steps between two changes of the period.
    """

    interval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check("interval", self.interval, 1)

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The loss, as "loss"."""
        return frozenset({"loss"})

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """Set the period at the end of an interval."""
        done, loss, lr = facts["step"] + 1, facts["loss"], facts["lr"]
        schedule_state = {**schedule_state, "last": done}
        if "loss_0" not in schedule_state:
            return {**schedule_state, "loss_0": loss, "lr_0": lr, "choice": float(self.interval)}
        if lr > schedule_state["lr_0"]:
            return {**schedule_state, "lr_0": lr, "choice": done + self.interval}
        if done < schedule_state["choice"]:
            return schedule_state
        rates = schedule_state["lr_0"] / lr if lr else 1.0
        ratio = rates * loss / schedule_state["loss_0"] if schedule_state["loss_0"] > 0 else 1.0
        period = math.ceil(math.sqrt(max(ratio, 0.0)) * self.sync_every)
        if period >= schedule_state["period"]:
            period = math.ceil(schedule_state["period"] / 2)
        return {**schedule_state, "period": float(max(1, period)), "choice": done + self.interval}


@dataclass(frozen=True)
class ByVariance(_Adaptive):
    """A period that keeps the replicas' variance in proportion to the learning rate.

    (Jiang & Agrawal 2020, "Adaptive Periodic Averaging", arXiv 2007.06134.) For the first `sample_steps` the
    period stays, and C, the mean of variance over learning rate, is taken. Then, after each round, with V the
    replicas' variance: below 0.7 * lr * C the period grows by a step, above 1.3 * lr * C it shrinks by one.

    Attributes:
        sync_every: the first period.
        sample_steps: the number of steps over which C is taken.
    """

    sample_steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check("sample_steps", self.sample_steps, 1)

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The replicas' variance, as "drift"."""
        return frozenset({"drift"})

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """Add to the sample, or compare with it and change the period."""
        variance, lr = facts["drift"], facts["lr"] or 1.0
        schedule_state = {**schedule_state, "last": facts["step"] + 1}
        count, c = schedule_state.get("samples", 0.0), schedule_state.get("c", 0.0)
        if count == 0 or facts["step"] < self.sample_steps:
            return {**schedule_state, "samples": count + 1, "c": c + (variance / lr - c) / (count + 1)}
        longer = (variance < 0.7 * lr * c) - (variance > 1.3 * lr * c)
        return {**schedule_state, "period": max(1.0, schedule_state["period"] + longer)}


@dataclass(frozen=True)
class ByLearningRate(_Adaptive):
    """A period that grows as the learning rate falls (QSR: Gu et al., ICLR 2024, arXiv 2310.14423).

    After each round, with lr the learning rate of its step:    H = max(H_base, floor((alpha / lr)^2)),
    H_base in the first round and where lr is larger than it ever was, as in a warm-up; `longest` at most.

    The less replicas move in a step, the more steps they may take alone; the paper finds that they then
    generalise better. Differences: the period is computed after the round before it, and not before its first
    step; and it has a bound, as the end of training is not known here. Without `alpha` the period is H_base
    at the largest rate so far, and grows by the inverse square from there. Where a schedule restarts,
    replicas step alone with the new rate until the period found before is over: `longest` bounds that, too.

    Attributes:
        sync_every: the shortest period, H_base.
        alpha: the learning rate with which the rule gives one step; None: sqrt(H_base) x the largest rate.
        longest: the longest period, in steps.
    """

    alpha: float | None = None
    longest: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            checks.real(
                "alpha", self.alpha, "write twice the largest learning rate, or leave it out", above=0
            )
        checks.whole("longest", self.longest, self.sync_every, None, "it is at least sync_every")

    @property
    def summary(self) -> str:
        """The shortest and the longest period."""
        return f"every {self.sync_every} steps, up to {self.longest} as the learning rate falls"

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The learning rate, as "lr"."""
        return frozenset({"lr"})

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """Set the period by the learning rate of the step that the round followed."""
        lr, largest = facts["lr"], schedule_state.get("largest", 0.0)
        schedule_state = {**schedule_state, "last": facts["step"] + 1, "largest": max(lr, largest)}
        return {**schedule_state, "period": float(self._period(lr, largest))}

    def _period(self, lr: float, largest: float) -> int:
        if lr > largest:
            return self.sync_every
        alpha = math.sqrt(self.sync_every) * largest if self.alpha is None else self.alpha
        if lr * math.sqrt(self.longest) <= alpha:
            return self.longest
        return max(self.sync_every, math.floor((alpha / lr) ** 2 * (1 + 1e-9)))


@dataclass(frozen=True)
class OnPlateau(_Adaptive):
    """A period that is divided whenever the loss of an epoch has stopped falling. A round ends each epoch.

    Attributes:
        sync_every: the first period.
        patience: how many epochs in a row may pass without improvement before it counts as a plateau.
        threshold: by what share the loss must fall below the best to count as improved, from 0 to below 1.
        factor: what the period is divided by.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch"})

    patience: int = 2
    threshold: float = 0.05
    factor: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check("patience", self.patience, 0)
        check("factor", self.factor, 2)
        check_share("threshold", self.threshold)

    def at(self, step: int, schedule_state: ScheduleState, part: int = 0) -> Sync | None:
        """A round once `period` steps have passed since the last one, and at each epoch's end."""
        ends = (step + 1) % int(schedule_state["steps_per_epoch"]) == 0
        return Sync(step, observe=True) if ends else super().at(step, schedule_state)

    @property
    def observed_metrics(self) -> frozenset[str]:
        """The loss, as "loss"."""
        return frozenset({"loss"})

    def observe(self, schedule_state: ScheduleState, facts: ScheduleState) -> ScheduleState:
        """Add up the loss of the epoch; at its end compare it with earlier epochs."""
        done = facts["step"] + 1
        total = schedule_state.get("total", 0.0) + facts["loss"] * (done - schedule_state["last"])
        schedule_state = {**schedule_state, "last": done, "total": total}
        if done % schedule_state["steps_per_epoch"]:
            return schedule_state
        loss = total / schedule_state["steps_per_epoch"]
        flat, schedule_state = plateau({**schedule_state, "total": 0.0}, loss, self.patience, self.threshold)
        if not flat:
            return schedule_state
        return {**schedule_state, "period": float(max(1, int(schedule_state["period"]) // self.factor))}


def plateau(
    schedule_state: ScheduleState, loss: float, patience: int, threshold: float
) -> tuple[bool, ScheduleState]:
    """Whether the loss of an epoch shows a plateau, and the new schedule state: "best", and "bad" epochs.

    Better means below the best by a share of `threshold`. A plateau is more than `patience` epochs in a
    row that are not better. Counting then starts again, and the best stays. Losses may be negative.
    """
    best = schedule_state.get("best", math.inf)
    better = loss < best - abs(best) * threshold if best < math.inf else True
    bad = 0.0 if better else schedule_state.get("bad", 0.0) + 1
    flat = bad > patience
    return flat, {**schedule_state, "best": loss if better else best, "bad": 0.0 if flat else bad}
