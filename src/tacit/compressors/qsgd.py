"""A few levels an entry, at random (QSGD: Alistarh et al., NeurIPS 2017, arXiv 1610.02132)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tacit import checks
from tacit.compressors.levels import StochasticLevels, check_bucket
from tacit.kernels.levels import BY_LARGEST, BY_NORM


@dataclass(frozen=True)
class QSGD(StochasticLevels):
    """Round each entry to one of 2 s + 1 levels at random, s = 2^(bits - 1) - 1; unbiased.

    A bucket is sent as multiples of its scale / s. Bytes: bits x n / 8 + 4 x ceil(n / bucket), to P - 1 peers
    (the first term rounded up to whole groups of g = 8 / gcd(bits, 8) levels: ceil(n / g) x bits x g / 8).
    No error feedback is needed; the variance of one round is at most scale^2 / (4 s^2) an entry.
    Differences from the paper: levels have a fixed number of bits, not Elias's code, and the whole
    bucket is cut into buckets, not each tensor.

    Attributes:
        bits: of a level, 2 to 8. Fewer send less, and are noisier.
        bucket: entries that share a scale, a power of two. Smaller ones are less noisy and send more scales.
        scale: "largest": the bucket's largest magnitude, as in the paper's experiments. "norm": its Euclidean
            norm, as in the paper's theorem; with levels of fixed width it is noisier and saves nothing.
    """

    bits: int = 4
    bucket: int = 512
    scale: Literal["largest", "norm"] = "largest"

    def __post_init__(self) -> None:
        checks.whole("bits", self.bits, 2, 8, "it is the length of a level with its sign; write 4")
        check_bucket(self.bucket)
        checks.one_of("scale", self.scale, ("largest", "norm"))

    @property
    def width(self) -> int:
        """`bits`, those of a level."""
        return self.bits

    @property
    def top(self) -> float:
        """The scale: the largest level is 1 times it."""
        return BY_LARGEST if self.scale == "largest" else BY_NORM
