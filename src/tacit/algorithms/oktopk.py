"""Ok-Topk (Li & Hoefler, PPoPP 2022, arXiv 2201.07598).

The algorithm on each worker r:                                     here:
    acc_r <- g_r + e_r                                              ErrorFeedback: add the residual
    the k largest of acc_r                                          OkTopK: exactly, by `select_largest`
    bounds of P regions with equally many of them, averaged         OkTopK: an all-reduce of P - 1 numbers
    split and reduce: each region to its rank, which adds up        OkTopK: an all-to-all
    balance and all-gather: the k largest of all sums               OkTopK: an all-gather of equal parts
    e_r <- acc_r, less what is among these                          ErrorFeedback
    x   <- x - lr * their mean                                      the user's optimizer

A rank sends about 5 k (P - 1) / P numbers (the paper: less than 6 k (P - 1) / P), however many ranks there
are, where an all-gather sends 2 k (P - 1).

Differences from the paper: messages have a fixed size, a quarter more than an equal share; what does not fit
waits. Thresholds and bounds are found anew in each round. The choice is made over a bucket, of which each is
split among all ranks; biases and norms are sent densely.
"""

from __future__ import annotations

from tacit.algorithms.options.warmups import warmed_up
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, OkTopK
from tacit.contracts import Compressor
from tacit.strategy import Strategy


@algorithm(
    family="sparsification",
    paper="Ok-Topk: Li & Hoefler 2022, arXiv 2201.07598",
    compresses=True,
    changes="the largest entries go to the ranks that add them up, and the largest sums come back",
)
def oktopk(ratio: float = 0.01, warmup_steps: int = 0) -> Strategy:
    """One entry in 1 / `ratio` is sent, and as many of the sums arrive; the rest stays in the residual."""

    def owing(ratio: float) -> Compressor:
        return ErrorFeedback(OkTopK(ratio=ratio))

    return Strategy(compressor=warmed_up(owing, ratio, warmup_steps))
