"""WHEN replicas talk. Pure state machines: every rank decides alike, without asking."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from tacit.contracts import Memory, Rounds
from tacit.errors import ConfigError


@dataclass(frozen=True)
class EveryStep(Rounds):
    """After every attempt of the optimizer: synchronous training."""

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """Always."""
        return True


@dataclass(frozen=True)
class Until(Rounds):
    """After every attempt of the first `stop`, and never again: another level then takes over."""

    stop: int

    def __post_init__(self) -> None:
        _check("stop", self.stop, 1)

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """In steps 0 to `stop` - 1."""
        return step < self.stop


@dataclass(frozen=True)
class Every(Rounds):
    """After every `sync_every`-th attempt. Larger says less, and lets replicas drift further apart.

    Attributes:
        sync_every: the period K, in steps.
        fragments: into how many parts the model is cut, each with a round every K steps, in turn: one of
            them every K / `fragments` steps (Streaming DiLoCo: Douillard et al. 2025).
        start_step: the step from which on periods are counted; before it another level keeps replicas equal.
    """

    sync_every: int
    fragments: int = 1
    start_step: int = 0

    def __post_init__(self) -> None:
        _check("sync_every", self.sync_every, 1)
        _check("fragments", self.fragments, 1)
        _check("start_step", self.start_step, 0)
        if self.fragments > self.sync_every:
            raise ConfigError(
                f"fragments={self.fragments} cannot take turns within sync_every={self.sync_every} steps: "
                "write no more fragments than steps"
            )

    @property
    def parts(self) -> int:
        """The fragments."""
        return self.fragments

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """After K, 2K, ... steps from the start; of N fragments, part p is earlier by K - (p + 1) K / N."""
        done = step + 1 - self.start_step
        offset = (part + 1) * self.sync_every // self.fragments
        return done > 0 and (done - offset) % self.sync_every == 0

    def sleeps(self, step: int, memory: Memory) -> bool:
        """Before the start."""
        return step < self.start_step


@dataclass(frozen=True)
class EveryEpoch(Rounds):
    """Once an epoch, after its last step."""

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch"})

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """After steps S - 1, 2S - 1, ... (counted from 0), of S steps an epoch."""
        return (step + 1) % int(memory["steps_per_epoch"]) == 0


@dataclass(frozen=True)
class _Adaptive(Rounds):
    """A period that changes. Remembered: "period", and "last", the number of steps up to the last round."""

    sync_every: int

    def __post_init__(self) -> None:
        _check("sync_every", self.sync_every, 1)

    def start(self, step: int = 0) -> Memory:
        """The first period."""
        return {"period": float(self.sync_every), "last": float(step)}

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """A period after the last round."""
        return step + 1 - memory["last"] >= memory["period"]


@dataclass(frozen=True)
class AdaComm(_Adaptive):
    """A period that shrinks with the loss (AdaComm: Wang & Joshi, SysML 2019, arXiv 1810.08313).

    After each interval l:    tau_l = ceil(sqrt(lr_0 / lr_l * F_l / F_0) * tau_0),
    and where that is not smaller than the period was: half of it, rounded up.

    F_0 is the loss over the steps before the first round, F_l over those before the interval's end; the
    paper takes the loss at the point itself. The interval is in steps, where the paper has 60 seconds.

    Attributes:
        sync_every: the first period, tau_0.
        interval: steps between two choices.
    """

    wants: ClassVar[frozenset[str]] = frozenset({"loss"})

    interval: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("interval", self.interval, 1)

    def observe(self, memory: Memory, facts: Memory) -> Memory:
        """Choose anew where an interval has ended."""
        done, loss, lr = facts["step"] + 1, facts["loss"], facts["lr"]
        memory = {**memory, "last": done}
        if "loss_0" not in memory:
            return {**memory, "loss_0": loss, "lr_0": lr, "choice": float(self.interval)}
        if done < memory["choice"]:
            return memory
        rates = memory["lr_0"] / lr if lr else 1.0
        ratio = rates * loss / memory["loss_0"] if memory["loss_0"] > 0 else 1.0
        period = math.ceil(math.sqrt(max(ratio, 0.0)) * self.sync_every)
        if period >= memory["period"]:
            period = math.ceil(memory["period"] / 2)
        return {**memory, "period": float(max(1, period)), "choice": done + self.interval}


@dataclass(frozen=True)
class ByVariance(_Adaptive):
    """A period that keeps the replicas' variance in proportion to the learning rate.

    (Jiang & Agrawal 2020, "Adaptive Periodic Averaging", arXiv 2007.06134.) For the first `sample_steps` the
    period stays, and C, the mean of variance over learning rate, is taken. Then, after each round, with V the
    replicas' variance: below 0.7 * lr * C the period grows by a step, above 1.3 * lr * C it shrinks by one.

    Attributes:
        sync_every: the first period.
        sample_steps: for how long C is taken.
    """

    wants: ClassVar[frozenset[str]] = frozenset({"drift"})

    sample_steps: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("sample_steps", self.sample_steps, 1)

    def observe(self, memory: Memory, facts: Memory) -> Memory:
        """Sample, or compare with the sample."""
        variance, lr = facts["drift"], facts["lr"] or 1.0
        memory = {**memory, "last": facts["step"] + 1}
        count, c = memory.get("samples", 0.0), memory.get("c", 0.0)
        if count == 0 or facts["step"] < self.sample_steps:
            return {**memory, "samples": count + 1, "c": c + (variance / lr - c) / (count + 1)}
        turn = (variance < 0.7 * lr * c) - (variance > 1.3 * lr * c)
        return {**memory, "period": max(1.0, memory["period"] + turn)}


@dataclass(frozen=True)
class OnPlateau(_Adaptive):
    """A period that is divided whenever the loss of an epoch has stopped to fall. A round ends each epoch.

    Attributes:
        sync_every: the first period.
        patience: how many epochs in a row may pass without improvement before it counts as a plateau.
        threshold: by what share the loss must fall below the best to count as improved, from 0 to below 1.
        factor: what the period is divided by.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch"})
    wants: ClassVar[frozenset[str]] = frozenset({"loss"})

    patience: int = 2
    threshold: float = 0.05
    factor: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        _check("patience", self.patience, 0)
        _check("factor", self.factor, 2)
        if type(self.threshold) not in (int, float) or not 0 <= self.threshold < 1:
            raise ConfigError(
                f"threshold={self.threshold!r} is not possible: write a share from 0 to below 1"
            )

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """A period after the last round, and at each epoch's end."""
        return super().due(step, memory) or (step + 1) % int(memory["steps_per_epoch"]) == 0

    def observe(self, memory: Memory, facts: Memory) -> Memory:
        """Add up the loss of the epoch, and compare epochs."""
        done = facts["step"] + 1
        total = memory.get("total", 0.0) + facts["loss"] * (done - memory["last"])
        memory = {**memory, "last": done, "total": total}
        if done % memory["steps_per_epoch"]:
            return memory
        loss, best = total / memory["steps_per_epoch"], memory.get("best", math.inf)
        better = loss < best * (1 - self.threshold) if best < math.inf else True
        bad = 0.0 if better else memory.get("bad", 0.0) + 1
        memory = {**memory, "total": 0.0, "best": loss if better else best, "bad": bad}
        if bad <= self.patience:
            return memory
        return {**memory, "bad": 0.0, "period": float(max(1, int(memory["period"]) // self.factor))}


def _check(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        what = "parts" if name == "fragments" else "epochs" if name == "patience" else "steps"
        what = "" if name == "factor" else f" {what}"
        raise ConfigError(f"{name}={value!r} is not possible: write {least} or more{what}")
