"""DASO's schedule: rounds that block, rounds that come late, and periods that change with the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from tacit.contracts import Memory, Rounds
from tacit.errors import ConfigError
from tacit.rounds.adaptive import plateau
from tacit.rounds.bounds import check, check_share

SLACK = 1.1
"""How much longer than measured a transfer may take and still be hidden, where the period is chosen."""
PROBES = 2
"""Late rounds that are measured one by one before the period is chosen at the ends of epochs only."""


@dataclass(frozen=True)
class Cycling(Rounds):
    """Warm-up, cycling and cool-down of DASO (Coquelin et al. 2021, arXiv 2104.05588, sections 3.2 and 3.3).

    In the first and last epochs a round follows every step, and is applied at once. In between, one leaves
    every B steps, and its answer is applied W steps later; every epoch ends with a round that is applied at
    once. Batches are counted within the epoch. Where the loss of an epoch has stopped to fall, B and L are
    divided by `skip_reduction_factor` and W is one less; where B is 1 already, B becomes `most`, and W and L
    become `most` / `local_skip_factor`. The first loss that is judged is that of the last warm-up epoch.

    What would land just before the next round leaves, lands with it (so in the authors' code): with B = 2 and
    W = 1 the lag is 2. It is then weighted by the lag that it has.

    Remembered: "period", B; "delay", W; "local", L; "parted", whether L has been above 1; "best" and "bad",
    of the loss; "asked".

    Attributes:
        period: B at first. "auto": the least for which the transfers are hidden, from how long they take and
            how long steps take; an answer lands as the next round leaves. The loss then changes nothing.
        delay: W at first; below B, or both are 1.
        local: L: while cycling, the replicas of a node meet in every L-th step only, from when an answer has
            landed until the next round leaves.
        most: B after the reset.
        warmup_epochs: None: a tenth of the epochs, and 4 at most. So for `cooldown_epochs`.
        patience: how many epochs in a row may pass without improvement before it counts as a plateau.
        threshold: by what share the loss must fall below the best to count as improved, from 0 to below 1.
        skip_reduction_factor: what B and L are divided by on a plateau, 2 or more.
        local_skip_factor: how many times W and L are smaller than B after the reset, 2 or more. This and
            `skip_reduction_factor` have the names that they have in the authors' code; the text form of
            `daso` does not take them.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"steps_per_epoch", "epochs"})
    late: ClassVar[bool] = True

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
                    f"delay={self.delay} with period={self.period}: an answer would come after the next "
                    f"round has left. Write delay={max(1, self.period - 1)} at most, or a longer period"
                )
        elif (self.delay, self.local) != (1, 1):
            raise ConfigError(
                f"period='auto' chooses when answers land, and delay={self.delay}, local={self.local} were "
                "given: leave them out, or give the period as a number"
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
    def wants(self) -> frozenset[str]:
        """The loss; or how long transfers take."""
        return frozenset({"transfer" if self.period == "auto" else "loss"})

    def start(self, step: int = 0) -> Memory:
        """The first B, W, L."""
        if self.period == "auto":
            return {"period": 4.0, "delay": 4.0, "local": 1.0, "asked": 0.0}
        return {
            "period": float(self.period),
            "delay": float(self.delay),
            "local": float(self.local),
            "parted": float(self.local > 1),
        }

    # ---- phases ---------------------------------------------------------------------------------------

    def _epochs(self, memory: Memory) -> tuple[int, int]:
        """With which epoch cycling begins, and with which one it has ended."""
        total = int(memory["epochs"])
        few = min(4, total // 10)
        warm = few if self.warmup_epochs is None else self.warmup_epochs
        cool = few if self.cooldown_epochs is None else self.cooldown_epochs
        return warm, max(warm, total - cool)

    def phases(self, memory: Memory) -> tuple[tuple[int, bool], ...]:
        """Warm-up, cycling, cool-down."""
        (warm, cool), steps = self._epochs(memory), int(memory["steps_per_epoch"])
        return (warm * steps, False), ((cool - warm) * steps, True), (steps, False)

    def _blocks(self, step: int, memory: Memory) -> bool:
        warm, cool = self._epochs(memory)
        return not warm <= step // int(memory["steps_per_epoch"]) < cool

    def _batch(self, step: int, memory: Memory) -> tuple[int, int]:
        """Which batch of its epoch it is, and which the last one is."""
        steps = int(memory["steps_per_epoch"])
        return step % steps, steps - 1

    # ---- when -----------------------------------------------------------------------------------------

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """In every B-th batch of an epoch, from the first on, and in its last one; else in every step."""
        k, last = self._batch(step, memory)
        return self._blocks(step, memory) or k == last or k % int(memory["period"]) == 0

    def lands(self, step: int, memory: Memory) -> int:
        """W batches later, or with the next round where that is but one batch further."""
        k, last = self._batch(step, memory)
        if self._blocks(step, memory) or k == last:
            return step
        period, delay = int(memory["period"]), int(memory["delay"])
        following = period - k % period
        return step + min(following if following <= delay + 1 and period > 1 else delay, last - k)

    def turn(self, step: int, memory: Memory) -> int:
        """How many rounds the epoch has had before it."""
        k, _ = self._batch(step, memory)
        return k if self._blocks(step, memory) else math.ceil(k / memory["period"])

    def meets_inside(self, step: int, memory: Memory) -> bool:
        """Whether the replicas of a node average their gradients in this step."""
        k, last = self._batch(step, memory)
        local = int(memory["local"])
        if local == 1 or k == last or self._blocks(step, memory):
            return True
        since = k % int(memory["period"]) - int(memory["delay"])
        return k % int(memory["period"]) == 0 or since <= 0 or since % local == 0

    def parted(self, step: int, memory: Memory) -> bool:
        """Once L has been above 1: replicas may meet again, but not their optimizers' states."""
        return bool(memory.get("parted"))

    # ---- periods that change --------------------------------------------------------------------------

    def asks(self, step: int, memory: Memory) -> bool:
        """At the end of every epoch; and where the period is to be chosen, after its first late rounds."""
        k, last = self._batch(step, memory)
        probes = k > 0 and not self._blocks(step, memory) and memory.get("asked", PROBES) < PROBES
        return k == last or probes

    def observe(self, memory: Memory, facts: Memory) -> Memory:
        """After a cycling epoch: divide on a plateau. Where the period is to be chosen: choose it.

        The loss of the last warm-up epoch is compared with, as in the authors' code; others that block are
        not looked at.
        """
        step = int(facts["step"])
        if self._blocks(step, memory) and (self.period == "auto" or not self._warmed_up(step, memory)):
            return memory
        if self.period == "auto":
            return self._chosen(memory, facts["transfer"])
        flat, memory = plateau(memory, facts["loss"], self.patience, self.threshold)
        if not flat:
            return memory
        if memory["period"] == 1:
            return self._begun_again(memory)
        period = max(1.0, memory["period"] // self.skip_reduction_factor)
        delay = max(1.0, min(memory["delay"] - 1, period - 1))
        local = max(1.0, memory["local"] // self.skip_reduction_factor)
        return {**memory, "period": period, "delay": delay, "local": local}

    def _warmed_up(self, step: int, memory: Memory) -> bool:
        """Whether the next step is the first one that cycles."""
        warm, cool = self._epochs(memory)
        return step + 1 == warm * int(memory["steps_per_epoch"]) and warm < cool

    def _begun_again(self, memory: Memory) -> Memory:
        part = float(max(1, self.most // self.local_skip_factor))
        parted = max(memory["parted"], float(part > 1))
        return {**memory, "period": float(self.most), "delay": part, "local": part, "parted": parted}

    def _chosen(self, memory: Memory, transfer: float) -> Memory:
        memory = {**memory, "asked": memory["asked"] + 1}
        if transfer <= 0:  # nothing has been on its way
            return memory
        period = float(max(1, math.ceil(transfer * SLACK)))
        return {**memory, "period": period, "delay": period}


@dataclass(frozen=True)
class Inside(Rounds):
    """When the replicas of a node average their gradients, while `schedule` is at work between the nodes."""

    follows: ClassVar[bool] = True

    schedule: Cycling

    def due(self, step: int, memory: Memory, part: int = 0) -> bool:
        """As the schedule has it."""
        return self.schedule.meets_inside(step, memory)
