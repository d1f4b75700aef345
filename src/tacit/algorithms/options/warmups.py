"""A compression that sets in over some steps, as DGC's warm-up does (Lin et al., ICLR 2018, section 3.3)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tacit import compressors
from tacit.contracts import Compressor
from tacit.errors import ConfigError

WARMUP = (0.25, 0.0625, 0.015625, 0.00390625)
"""Ratios of the paper's four phases, each a quarter of the one before."""


def warmed_up(of: Callable[[float], Compressor], ratio: float, steps: int) -> Compressor:
    """The compressor of this ratio, after `steps` steps in which the ratio falls from a quarter to it.

    Args:
        of: makes the compressor of a ratio.
        ratio: the share of the entries that is sent in the end.
        steps: of the optimizer, for all four phases; 0 for none.

    Raises:
        ConfigError: so many steps cannot be cut into four phases.
    """
    after = of(ratio)
    if type(steps) is not int or steps < 0 or 0 < steps < len(WARMUP):
        raise ConfigError(
            f"warmup_steps={steps!r} cannot be cut into {len(WARMUP)} phases: write how many steps the whole "
            "warm-up takes, such as those of four epochs, or 0 for none"
        )
    if not steps:
        return after
    cuts = [steps * i // len(WARMUP) for i in range(len(WARMUP) + 1)]
    phases = zip(pairwise(cuts), WARMUP, strict=True)
    return compressors.Scheduled(
        tuple((stop - start, of(max(ratio, each))) for (start, stop), each in phases), after
    )
