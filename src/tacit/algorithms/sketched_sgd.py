"""Sketched-SGD (Ivkin, Rothchild, Ullah, Braverman, Stoica & Arora, NeurIPS 2019, arXiv 1903.04488).

The algorithm on each worker r:                                 here:
    a_r <- u_r + g_r                                            ErrorFeedback: add the residual
    S_r <- the count sketch of a_r;  S <- sum_r S_r             CountSketch: the first all-reduce
    H   <- the P k coordinates that S shows as largest          CountSketch: medians, alike on all ranks
    the values of a_r on H;  the k largest of their mean        CountSketch: the second all-reduce
    u_r <- 0 where an entry was taken                           ErrorFeedback: what was not sent stays
    x   <- x - lr * that mean                                   the user's optimizer

With `momentum` in the optimizer it is applied to the mean; the paper applies it on each worker, as
`MomentumCorrection` does. Bytes do not grow with the ranks: 2 (P - 1) / P x 4 x (5 width + 4 ratio) n.

Differences from the paper: there is no server; hash functions are drawn anew in each round; biases and norms
are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import CountSketch, ErrorFeedback
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="Sketched-SGD: Ivkin et al. 2019, arXiv 1903.04488",
    compresses=True,
    changes="sketches that add up show which entries of the sum are largest; only these are sent",
    instead="topk",
)
def sketched_sgd(ratio: float = 0.01, width: float = 0.02) -> Strategy:
    """A sketch of five rows of `width` sums an entry, and the largest entries of the mean by it."""
    return Strategy(compressor=ErrorFeedback(CountSketch(ratio=ratio, width=width)))
