"""Means of a few seeds, with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_NORMAL = 1.959964
# fmt: off
_STUDENT = (
    12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
    2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
    2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272,
)
# fmt: on
"""The two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """A mean, and half the width of its 95 % interval by Student's t.

    Attributes:
        half: None for one sample.
        count: how many samples there are.
    """

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Mean | None:
        """Of independent samples; None where there are none."""
        if not samples:
            return None
        half, count = None, len(samples)
        if count > 1:
            half = student(count - 1) * statistics.stdev(samples) / math.sqrt(count)
        return cls(statistics.fmean(samples), half, count)


def student(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t; above 30 degrees of freedom to three digits."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
