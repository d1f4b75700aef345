"""Where a NaN began, as one number that fits into the nonfinite flags, which travel anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

MOST = 1 << 18
"""A mean of fp32 numbers below this one still shows which of the ranks gave which."""


class Origin(NamedTuple):
    """Where a rank first saw what is not finite.

    Attributes:
        name: the parameter; where there are several, the first of the model's.
        age: how many steps ago, up to the largest that the number can hold.
        several: whether it was in others too at that time.
    """

    name: str
    age: int = 0
    several: bool = False

    def words(self, rank: int, step: int) -> str:
        """What an error says of it, where that was not in this very step."""
        others = " and in others too, so it may have begun in any of them, or in the loss" * self.several
        first = f"first in step {step - self.age}" if self.age <= step else "before the first step"
        return f"rank {rank} had it {first}, in {self.name}{others}"


def beginnings(found: Mapping[int, Origin], step: int) -> str:
    """Sentences that say where it began; none where that was in this step, in one parameter."""
    each = [began.words(rank, step) for rank, began in found.items() if began.age or began.several]
    return "".join(f"{one[0].upper()}{one[1:]}. " for one in each)


def encode(origin: Origin, names: Sequence[str]) -> int:
    """A number above 0; `names`: all that there are, in the same order on all ranks."""
    step = 2 * len(names)
    age = min(origin.age, MOST // step - 1)
    return 1 + 2 * names.index(origin.name) + origin.several + step * max(0, age)


def decode(number: int, names: Sequence[str]) -> Origin:
    """What was encoded."""
    age, rest = divmod(number - 1, 2 * len(names))
    return Origin(names[rest // 2], age, bool(rest % 2))
