"""Three levels, at random (TernGrad: Wen et al., NeurIPS 2017, arXiv 1705.07878)."""

from __future__ import annotations

from dataclasses import dataclass

from tacit import checks
from tacit.compressors.levels import StochasticLevels, check_bucket
from tacit.kernels.levels import BY_LARGEST


@dataclass(frozen=True)
class TernGrad(StochasticLevels):
    """Send s x (-1, 0 or 1) for each entry g, with probability |g| / s not 0; s is the largest magnitude.

    Before that, g is clipped to `clip` deviations, so that s is not that of one outlier; except for
    clipping it is unbiased. Bytes: ceil(n / 4) + 4 x ceil(n / bucket), to P - 1 peers.
    Differences from the paper: a bucket of entries where it has a layer, and so a scale for each; deviations
    are counted from zero, so that equal entries are not clipped to nothing; workers share no scale, as what
    is averaged here is decoded; 2 bits where log2(3) would do.

    Attributes:
        clip: how many root mean squares of its bucket an entry may have, 1 or more; None: no clipping.
        bucket: entries that share a scale, a power of two.
    """

    clip: float | None = 2.5
    bucket: int = 512

    def __post_init__(self) -> None:
        hint = "it is how many deviations an entry may have; write 2.5, or None not to clip"
        if self.clip is not None:
            checks.real("clip", self.clip, hint, least=1)
        check_bucket(self.bucket)

    @property
    def width(self) -> int:
        """Two, as there are three levels."""
        return 2

    @property
    def top(self) -> float:
        """`clip`."""
        return BY_LARGEST if self.clip is None else self.clip
