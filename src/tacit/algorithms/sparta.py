"""SPARTA, sparse parameter averaging (Exo Labs 2025).

In each step, on worker r:                                  here:
    x_r <- a step of any optimizer, by this worker's batch  the user's optimizer
    draw a share p of the parameters, alike on all workers  RandomK: positions from the common seed
    x_r <- mean_r(x_r) on these; the others stay            RandomK of the delta, and LocalResidual

Nothing but the drawn parameters is sent, by an all-reduce. In 1 / p steps each has been averaged once.

Differences from the published method: one is drawn from each of k equal spans, so that no parameter waits
long; biases and norms are averaged in every round; its optional delay is not here. Of it accounts were read;
the default of p is ours.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import RandomK
from tacit.merges import LocalResidual
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="SPARTA: Exo Labs 2025",
    compresses=True,
    changes="a few random parameters are averaged in each step; the replicas differ in the others",
)
def sparta(ratio: float = 0.005, sync_every: int = 1) -> Strategy:
    """Average one parameter in 1 / `ratio`, drawn anew in each round; the others stay each replica's own."""
    return Strategy(
        subject="delta", rounds=Every(sync_every), compressor=RandomK(ratio=ratio), merge=LocalResidual()
    )
