"""Whether all ranks have the same learning rates, and parameters where they should be the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tacit.failure.store_comparison import StepHistory, StepNote
from tacit.session.learning_rates import Rates

_log = logging.getLogger("tacit")
_ROUNDING = 1e-9
"""The relative difference that is allowed between two machines' rates of the same schedule."""
_APART = 0.01
"""The share of their norm by which two ranks' parameters may differ without a warning: kinds of processors
round differently, and adding a value and subtracting it again does not restore the same bits.
"""


class _Rated(NamedTuple):
    """The rates of a step, the sum of all rates up to it, and a mark of the parameters, if it was taken."""

    step: int
    now: list[float]
    sum: float
    loads: int
    mark: Sequence[float] = ()

    def noted(self) -> StepNote:
        each = self.now, [self.sum], self.mark
        return StepNote(self.step, ";".join(",".join(map(repr, part)) for part in each), self.loads)


class RateHistory(StepHistory):
    """Records the rates after every step; now and then ranks compare their records of the same step.

    The step is not negotiated: of the steps since the last comparison, a rank offers the one that is
    divisible by the largest power of two. All ranks offer steps divisible by a power larger than the interval
    between two comparisons. So they have a step in common within about three intervals, or in the next step
    if steps are slow.

    Args:
        rates: reads them.
        mark: returns two numbers that depend on the parameters' present values, the first their norm, if
            parameters must be equal on all ranks; called in the few steps that are offered.
    """

    def __init__(self, rates: Rates, mark: Callable[[], Sequence[float]] = tuple) -> None:
        self._rates, self._mark = rates, mark
        self._loads = 0
        self._told = False
        self._begin()

    def loaded(self) -> None:
        """Drop all records, as a checkpoint was loaded on every rank: they are of other steps."""
        self._loads += 1
        self._begin()

    def _begin(self) -> None:
        self._sum = 0.0
        self._last: _Rated | None = None
        self._offered: _Rated | None = None

    def stepped(self, step: int) -> None:
        """Record the rates after a step; `step`: the number of steps taken."""
        now = self._rates.by_group()
        self._sum += sum(now)
        self._last = _Rated(step, now, self._sum, self._loads)
        offered = self._offered
        # By the largest power of two that divides it.
        if offered is None or step & -step >= offered.step & -offered.step:
            self._offered = self._last._replace(mark=self._mark())

    @property
    def last(self) -> StepNote | None:
        return None if self._last is None else self._last.noted()

    def take(self) -> StepNote | None:
        offered, self._offered = self._offered, None
        return None if offered is None else offered.noted()

    def differ(self, one: int, ones: StepNote, other: int, others: StepNote) -> str | None:
        """A sentence on two ranks' records; None: all rates and their sums are equal up to rounding.

        If their parameters differ, it logs a warning once; DDP would not find that either.
        """
        if one > other:
            one, ones, other, others = other, others, one, ones
        (our_rates, our_sum, ours), (their_rates, their_sum, theirs) = map(_parts, (ones, others))
        if ours and theirs and not self._told and not _near(ours, theirs):
            from tacit.replicas.equal_parameters import WRITE

            self._told = True
            _log.warning(
                "after step %d ranks %d and %d have other parameters, which all ranks should have the same: "
                "one of them was written alone. %s. session.sync() on every rank makes them their mean",
                *(ones.step, one, other, WRITE),
            )
        if _same([*our_rates, *our_sum], [*their_rates, *their_sum]):
            return None
        found = (
            f"rank {one} has taken step {ones.step} with the learning rate {_listed(our_rates)}, "
            f"rank {other} with {_listed(their_rates)}"
        )
        if our_rates == their_rates:
            found = f"ranks {one} and {other} had different learning rates in a step before {ones.step}"
        return (
            f"{found}, so their replicas drift apart: have all ranks change it alike, by the same schedule, "
            "and where that goes by a loss (ReduceLROnPlateau), by the mean of the ranks' losses"
        )


def _parts(note: StepNote) -> list[list[float]]:
    return [[float(each) for each in part.split(",") if each] for part in note.text.split(";")]


def _same(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether rates are equal up to rounding; NaN equals NaN."""
    return repr(ours) == repr(theirs) or (
        len(ours) == len(theirs)
        and all(math.isclose(a, b, rel_tol=_ROUNDING) for a, b in zip(ours, theirs, strict=True))
    )


def _near(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether two marks are of about the same parameters."""
    return repr(ours) == repr(theirs) or all(
        abs(a - b) <= _APART * max(ours[0], theirs[0]) for a, b in zip(ours, theirs, strict=True)
    )


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(map(repr, rates))
