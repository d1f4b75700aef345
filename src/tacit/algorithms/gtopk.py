"""Global top-k sparsification, gTop-k (Shi et al., ICDCS 2019, arXiv 1901.04359).

The paper's algorithm 4, on each worker r:          here:
    a_r <- g_r + e_r                                ErrorFeedback: add the residual
    s_r <- the k entries of a_r largest in |.|      TopK.encode
    e_r <- a_r - s_r                                ErrorFeedback: what was not sent is the new residual
    s, M <- gTopKAllReduce(s_r, k): merge by        GlobalTopK: log2 P swaps, in each of which two lists of k
        pairs, keeping the k largest                entries become one
    e_r <- e_r + s_r outside of M                   GlobalTopK: what every merge on the way has kept was sent,
                                                    the rest of s_r stays in the residual
    x   <- x - lr * s                               the mean, s / P

Differences from the paper: an entry that one merge rejects stays in the residual also where it comes into M
by way of other workers, so that nothing is lost; ranks swap, and nothing is broadcast; any number of ranks.
The k entries are chosen over a whole bucket, not tensor by tensor; biases and norms are sent densely, in a
message of their own. The paper warms up with larger ratios for a few epochs, which `warmup_steps` does by
DGC's.
"""

from __future__ import annotations

from tacit.algorithms.options.warmups import warmed_up
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, TopK
from tacit.contracts import Compressor
from tacit.strategy import Strategy
from tacit.topologies import GlobalTopK


@algorithm(
    family="sparsification",
    paper="gTop-k: Shi et al. 2019, arXiv 1901.04359",
    compresses=True,
    changes="of all ranks' largest entries only the largest are kept, in log2 P swaps; "
    "the rest is sent later",
    instead="topk",
)
def gtopk(ratio: float = 0.001, warmup_steps: int = 0) -> Strategy:
    """One entry in 1 / `ratio` is kept of all ranks' largest, merged along a tree; the rest waits."""

    def owing(ratio: float) -> Compressor:
        return ErrorFeedback(TopK(ratio=ratio))

    compressor = warmed_up(owing, ratio, warmup_steps)
    return Strategy(compressor=compressor, topology=GlobalTopK())
