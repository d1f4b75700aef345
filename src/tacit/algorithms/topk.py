"""Top-k sparsification with error feedback (Aji & Heafield, EMNLP 2017; Stich et al., NeurIPS 2018).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add what is owed
    s_r <- the k entries of a_r largest in |.|      TopK.encode
    e_r <- a_r - s_r                                ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(s_r)                     Auto: all-gather, then scatter-add of P sparse messages

Where that sends less, as from 3 ranks on, each rank averages one stretch for all and sends the mean
compressed too, with error feedback of its own (Auto, TwoPhase): of the up to P k
entries that came, the k largest; the others wait where they are. `topology=Flat()` lets all of them arrive.

Differences from the papers: the k entries are chosen over a whole lot (the tensors that travel in one
message), not tensor by tensor; parameters of fewer than two dimensions are sent densely in the same message.
"""

from __future__ import annotations

from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import ErrorFeedback
from tacit.strategy import Strategy


def topk(ratio: float = 0.01) -> Strategy:
    """One entry in 1 / `ratio` is sent, the largest; the rest is owed."""
    return Strategy(compressor=ErrorFeedback(TopK(ratio=ratio)), name="topk")
