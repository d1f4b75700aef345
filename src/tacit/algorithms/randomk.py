"""Random-k sparsification with error feedback (Stich et al., NeurIPS 2018, arXiv 1809.07599).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + m_r                                ErrorFeedback: add the residual
    s_r <- k entries of a_r at random               RandomK: the same entries on all ranks, by a shared seed
    m_r <- a_r - s_r                                ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * mean_r(s_r)                     a dense all-reduce of k numbers; no positions travel

With `unbiased` the entries are multiplied by 1 / ratio and no residual is kept: right in the mean, with 1 /
ratio times the variance (Wangni et al., NeurIPS 2018).

Differences from the paper: all workers choose the same entries; biases and norms are sent densely.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, RandomK
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="Stich et al. 2018, arXiv 1809.07599",
    compresses=True,
    changes="only entries drawn at random travel, the same on all ranks; "
    "the rest is sent later (error feedback)",
    instead="topk",
)
def randomk(ratio: float = 0.01, unbiased: bool = False) -> Strategy:
    """One entry in 1 / `ratio` is sent, at random; the rest waits, or is made up for if `unbiased`."""
    inner = RandomK(ratio=ratio, unbiased=unbiased)
    return Strategy(compressor=inner if unbiased else ErrorFeedback(inner))
