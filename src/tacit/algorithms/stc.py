"""Sparse ternary compression, STC (Sattler, Wiedemann, Mueller & Samek, TNNLS 2019, arXiv 1903.02891).

The paper's algorithm, on each worker r:            here: a_r <- g_r + e_r
    ErrorFeedback: add the residual S   <- the k entries of a_r largest in |.|      TopK.encode mu  <- the
    mean of |a_r| over S                 Sign.encode, of the chosen entries s_r <- mu sign(a_r) on S, 0
    elsewhere           TopK(values=Sign()): positions, a bit an entry, and mu e_r <- a_r - s_r
    ErrorFeedback: what was not sent is the new residual m   <- mean_r(s_r) + e
    TwoPhase: each rank averages one slice for all, and s   <- the same of m;  e <- m - s
    compresses the mean as the paper's server does, with x   <- x - lr * s
    separate error feedback

By `topology=all-gather` the mean arrives as it is: more bytes from 3 ranks on, and nothing is left out twice.

Differences from the paper: gradients are exchanged in every step, not weights after several; positions are
in low and high parts, not Golomb-coded; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, Sign, TopK
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="STC: Sattler et al. 2019, arXiv 1903.02891",
    compresses=True,
    changes="only the largest entries travel, as signs with one magnitude; the rest is sent later",
)
def stc(ratio: float = 0.01, topology: Way = "two-phase") -> Strategy:
    """One entry in 1 / `ratio` is sent, the largest, as a sign; all of them with one magnitude."""
    compressor = ErrorFeedback(TopK(ratio=ratio, values=Sign()))
    return Strategy(compressor=compressor, topology=way(topology))
