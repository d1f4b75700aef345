"""Local SGD (Stich, ICLR 2019; Zinkevich 2010; Lin et al., ICLR 2020).

The paper's algorithm, on each worker r:            here:
    x_r <- x_r - lr * g_r                           the user's optimizer; no gradient travels
    every H steps: x_r <- mean_r(x_r)               Every(sync_every=H), Average

What travels is the progress x_r - x since the last anchor x, not x_r itself: the same mean in exact
arithmetic, and with a compressor far better than it, as progress is small where parameters are not. The
optimizer's own state (momentum, Adam's moments) stays local, as in the paper, unless `momentum` says
otherwise: "averaged" in every round (Yu, Jin & Yang, ICML 2019), or "reset" to zero.
"""

from __future__ import annotations

from tacit.merges import Average
from tacit.rounds import Every
from tacit.strategy import Beside, Buffers, Strategy


def localsgd(sync_every: int = 8, momentum: Beside = "local", buffers: Buffers = "averaged") -> Strategy:
    """Average the replicas every `sync_every` steps, and say nothing in between."""
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        merge=Average(),
        momentum=momentum,
        buffers=buffers,
        name="localsgd",
    )
