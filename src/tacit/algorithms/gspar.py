"""Gradient sparsification by optimal sampling, GSpar (Wangni, Wang, Liu & Zhang, NeurIPS 2018).

arXiv 1710.09854. On each worker r, for each entry g_i:     here:
    p_i <- min(1, c |g_i|), c so that sum p_i = k           SampledEntries: `probabilities`
    Q(g_i) <- g_i / p_i with probability p_i, else 0        SampledEntries: k entries by one random number
    x   <- x - lr * mean_r(Q(g_r))                          Flat: all-gather, then scatter-add

It is right in the mean and keeps no residual, at the price of noise: `topk` keeps what it does not send.

Differences from the paper: exactly k entries are sent, where its number is random; the choice is made over a
whole bucket; values travel in fp32; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import SampledEntries
from tacit.strategy import Strategy
from tacit.topologies import Flat


@algorithm(
    family="sparsification",
    paper="GSpar: Wangni et al. 2018, arXiv 1710.09854",
    compresses=True,
    changes="entries are drawn by their size, and scaled so that the mean is right; no residual is kept",
    instead="topk",
)
def gspar(ratio: float = 0.05) -> Strategy:
    """One entry in 1 / `ratio` is sent, drawn with a probability in proportion to its size."""
    return Strategy(compressor=SampledEntries(ratio=ratio), topology=Flat())
