"""Overlap-Local-SGD (Wang, Liang & Joshi, ICASSP 2020, arXiv 2002.09539).

The paper's algorithm, on each worker r, with the anchor z:        here:
    x_r <- x_r - lr * g_r                                          the user's optimizer
    every tau steps: wait for the anchor of the round before       Delayed(tau): applied as the next leaves
                     x_r <- x_r - alpha * (x_r - z)                OuterStep(local=1 - alpha): the parameters
                     z' <- mean_r(x_r), while training goes on     Every(tau): leaves after the pull
    anchor momentum: v <- beta * v + (z' - z); z <- z + v          OuterStep(lr=1, momentum=beta)

What travels is x_r - z, so that any compressor may take it.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.merges import OuterStep
from tacit.overlap import Delayed
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="Overlap-Local-SGD: Wang et al. 2020, arXiv 2002.09539",
    compresses=False,
    changes="replicas are pulled to an anchor that is averaged while they train on",
)
def overlap_localsgd(sync_every: int = 8, alpha: float = 0.6, momentum: float = 0.7) -> Strategy:
    """Replicas are pulled to an anchor that is averaged while they train on."""
    checks.whole("sync_every", sync_every, 1, None, "write 1 or more steps, 8 are usual")
    checks.real("alpha", alpha, "how far a replica is pulled; write 0.6", above=0, most=1)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        overlap=Delayed(sync_every),
        merge=OuterStep(lr=1.0, momentum=momentum, nesterov=False, local=1.0 - alpha),
    )
