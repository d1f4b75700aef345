"""DiLoCoX's exchange, without its pipeline (Qi et al. 2025, arXiv 2506.21263).

In each outer step t, on worker r:                  here:
    H steps of the inner optimizer                  the user's optimizer
    a_r <- the progress of these steps + e_r        ErrorFeedback: add the residual
    C(a_r): low rank, then 4 bits                   QuantizedPowerSGD(rank, bits)
    e_r <- a_r - C(a_r)                             ErrorFeedback: what was not sent is the new residual
    the mean of C(a_r) travels while the next H     Delayed(H): it is applied H steps after it has left
        steps are taken: one step of delay
    theta <- OuterOpt(theta, the mean of step t - 1)  OuterStep(lr, momentum, local="steps"), Nesterov

A replica goes on from the new theta with what it has done since on top, so that each step's progress
travels in one round, the next. A rank sends, of a matrix of m x n, the levels of r (m + n) numbers in `bits`
bits to each of P - 1 peers, and 4 bytes for each 512 of them.

Differences from the paper: there is no pipeline. The rank and H stay as they are given, where the paper
adapts its compression while it trains. Values are QSGD's. Vectors, and matrices for which the rank saves
too little, are sent densely. The paper's abstract and introduction could be read, and no code of its
authors: low rank and 4 bits are from accounts of it; how a replica goes on is ours to answer for, and so
are all defaults. The inner optimizer's state stays local.

The outer momentum is less than DiLoCo's 0.9: with that, an outer step that comes a period late overshot in a
small training, compressed or not.
"""

from __future__ import annotations

from dataclasses import replace

from tacit.algorithms.diloco import diloco
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, QuantizedPowerSGD
from tacit.merges import OuterStep
from tacit.overlap import Delayed
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="DiLoCoX: Qi et al. 2025, arXiv 2506.21263",
    compresses=True,
    changes="DiLoCo whose deltas travel in low rank and 4 bits, behind the steps of the next period",
)
def dilocox(
    sync_every: int = 32,
    rank: int = 16,
    bits: int = 4,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
) -> Strategy:
    """DiLoCo's outer steps, one round late, by deltas of low rank in few bits; the rest is sent later."""
    return replace(
        diloco(sync_every, outer_lr, outer_momentum),
        compressor=ErrorFeedback(QuantizedPowerSGD(rank=rank, bits=bits)),
        overlap=Delayed(sync_every),
        merge=OuterStep(outer_lr, outer_momentum, local="steps"),
    )
