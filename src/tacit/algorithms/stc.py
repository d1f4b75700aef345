"""Sparse ternary compression, STC (Sattler, Wiedemann, Mueller & Samek, TNNLS 2019, arXiv 1903.02891).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add what is owed
    S   <- the k entries of a_r largest in |.|      TopK.encode
    mu  <- the mean of |a_r| over S                 Sign.encode, of the chosen entries
    s_r <- mu sign(a_r) on S, 0 elsewhere           TopK(values=Sign()): positions, a bit an entry, and mu
    e_r <- a_r - s_r                                ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(s_r)                     Auto: all-gather, then scatter-add of P messages

Where that sends less, as from 3 ranks on, each rank averages one stretch for all and sends the mean
compressed too, with error feedback of its own: the paper's second compression, on the way back to the
workers (Auto, TwoPhase). `topology=Flat()` sends it as it is.

Differences from the paper: gradients are exchanged in every step, not weights after several; positions are
in low and high parts, not Golomb-coded; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.compressors.sign import Sign
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.strategy import Strategy


def stc(ratio: float = 0.01) -> Strategy:
    """One entry in 1 / `ratio` is sent, the largest, as a sign; all of them with one magnitude."""
    return Strategy(compressor=ErrorFeedback(TopK(ratio=ratio, values=Sign())), name="stc")
