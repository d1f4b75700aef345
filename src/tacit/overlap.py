"""How communication is hidden behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from tacit.contracts import LateOverlap, Overlap
from tacit.errors import ConfigError

__all__ = ["Bucketwise", "Delayed"]


@dataclass(frozen=True)
class Bucketwise(Overlap):
    """Each bucket is sent when backward has filled it; all are complete before the optimizer steps (WFBP)."""

    def apply_at(self, step: int) -> int:
        """`step` itself."""
        return step


@dataclass(frozen=True)
class Delayed(LateOverlap):
    """The answer of a round is applied `steps` steps late; training goes on until then.

    The answer of the round of step t is applied after step t + `steps`, on all ranks: training waits
    for it there if it is not complete, and does not apply it earlier if it is. A gradient can be one step
    late: backward then replaces it by the mean of the step before (Pipe-SGD: Li et al., NeurIPS 2018), see
    `hooks.delayed`.

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
