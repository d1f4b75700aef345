"""How communication is hidden behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from tacit import checks
from tacit.contracts import Overlap
from tacit.errors import ConfigError

__all__ = ["Bucketwise", "Delayed", "Fused", "Prioritized"]


@dataclass(frozen=True)
class Bucketwise(Overlap):
    """Each bucket is sent when backward has filled it; all are complete before the optimizer steps (WFBP)."""

    def apply_at(self, step: int) -> int:
        """`step` itself."""
        return step


@dataclass(frozen=True)
class Delayed(Overlap):
    """The answer of a round is applied `steps` steps late; training goes on until then.

    The answer of the round of step t is applied after step t + `steps`, on all ranks: training waits
    for it there if it is not complete, and does not apply it earlier if it is. A gradient can be one step
    late: backward then replaces it by the mean of the step before (Pipe-SGD: Li et al., NeurIPS 2018), see
    `gradients.delayed`.

    Attributes:
        steps: how many steps late. More hide longer rounds, and apply older answers.
        warmup_steps: for gradients: the number of first steps whose answers are applied at once.
    """

    steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ConfigError(
                f"Delayed(steps={self.steps!r}) is not possible: write a whole number of 1 or more steps, "
                "or Bucketwise() for answers that are applied at once"
            )
        if type(self.warmup_steps) is not int or self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps!r} is not possible: write a whole number of steps, such as "
                "len(loader), or 0 for none"
            )

    def apply_at(self, step: int) -> int:
        """`steps` later; while warming up, `step` itself."""
        return step if step < self.warmup_steps else step + self.steps


@dataclass(frozen=True)
class Fused(Overlap):
    """Gradients are sent as soon as backward has them, joined into messages where that saves time.

    Without `megabytes`, messages are planned by what the first steps and the links have shown: a gradient
    waits for the next one if the link is busy until then, or if another message would cost more than the
    wait (MG-WFBP: Shi, Chu & Li, INFOCOM 2019).

    Attributes:
        megabytes: gradients are joined up to this size, and nothing is planned.
        credit: megabytes that may be under way at once; None: no limit.
    """

    megabytes: float | None = None
    credit: float | None = None

    layerwise = True

    def __post_init__(self) -> None:
        _check_sizes(self.megabytes, self.credit)

    def apply_at(self, step: int) -> int:
        """`step` itself."""
        return step


@dataclass(frozen=True)
class Prioritized(Overlap):
    """Gradients that the next forward pass needs first are sent first, the others while that pass runs.

    Each layer waits for its gradients when forward comes to it, and is stepped then, with the learning
    rate of the step to which they belong. The order is planned once, by what the first steps and the links
    have shown, and is equal on all ranks (P3: Jayarajan et al., MLSys 2019; ByteScheduler: Peng et al., SOSP
    2019). So the optimizer must be one that steps each parameter by itself, and nothing may look at gradients
    between backward and `optimizer.step`: clipping by a norm of all and a GradScaler are refused.

    Attributes:
        megabytes: gradients are joined up to this size; None: as large as they must be for the cost of a
            message to be small.
        credit: megabytes that may be under way at once, so that a gradient that is ready later and needed
            earlier waits for no more than that; None: no limit.
        split: messages leave in the order of backward, and with `Decoupled` only their reduce-scatters;
            their all-gathers follow when all of these have left, in the order of the next forward pass (DeAR:
            Zhang et al., ICDCS 2023).
    """

    megabytes: float | None = None
    credit: float | None = None
    split: bool = False

    layerwise = True
    into_forward = True

    def __post_init__(self) -> None:
        _check_sizes(self.megabytes, self.credit)
        checks.flag("split", self.split)

    def apply_at(self, step: int) -> int:
        """`step` itself."""
        return step


def _check_sizes(megabytes: float | None, credit: float | None) -> None:
    for name, given in (("megabytes", megabytes), ("credit", credit)):
        if given is not None:
            checks.real(name, given, "write 4 for four megabytes, or leave it out", above=0.0)
