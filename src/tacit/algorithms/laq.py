"""LAQ, lazily aggregated quantized gradients (Sun, Chen, Giannakis & Yang, NeurIPS 2019, arXiv 1909.07588).

On each worker r, in each step:                                     here:
    dq_r <- Q(g_r - q_r), b bits an entry                           LAQ, around Blockwise
    where |g_r - q_r|^2 is above xi times the last D motions        LAQ: the rule of LAG
        send dq_r;  q_r <- q_r + dq_r                               LAQ: all-gather, state `held`
    q <- q + mean_r(dq_r);  x <- x - lr * q                         LAQ: state `mean`; the user's optimizer

Differences from the paper: those of `lag`; its rule also has terms for the errors of rounding; each 512
entries share a scale, not all.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import LAQ
from tacit.strategy import Strategy


@algorithm(
    family="lazy",
    paper="LAQ: Sun et al. 2019, arXiv 1909.07588",
    compresses=True,
    changes="as lag; what has changed travels in a few bits an entry",
    instead="topk",
)
def laq(xi: float = 0.1, window: int = 10, bits: int = 4) -> Strategy:
    """A gradient stands until it has changed enough; the change then travels in `bits` bits an entry."""
    return Strategy(compressor=LAQ(xi=xi, window=window, bits=bits))
