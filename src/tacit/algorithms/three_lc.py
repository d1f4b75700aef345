"""3LC (Lim, Andersen & Kaminsky, MLSys 2019, arXiv 1802.07389).

The paper's steps, on each worker r:                        here:
    a_r <- g_r + e_r;  M <- s max|a_r|                      ErrorFeedback; ThreeLC, s = `sparsity`
    q_r <- round(a_r / M), one of -1, 0, 1                  ThreeLC.encode
    e_r <- a_r - M q_r                                      ErrorFeedback
    quartic encoding: five values a byte                    ThreeLC.encode
    zero-run encoding: 2 to 14 bytes of zeros in one        ThreeLC.shortened
    x   <- x - lr * mean_r(M q_r)                           TwoPhase: means are compressed, too

Differences from the paper: ranks average a slice each, where it has a parameter server; each 512 entries
have an M, not each tensor, as one M a bucket lost 26 points in 600 steps of CIFAR-10; biases and norms are
sent densely; it sends small layers as they are, here all weights are encoded. Messages are padded to the
longest of all ranks.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, ThreeLC
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="3LC: Lim et al. 2019, arXiv 1802.07389",
    compresses=True,
    changes="three values an entry, five in a byte, runs of zeros in one; the rest is sent later",
    instead="lowbit",
)
def three_lc(sparsity: float = 1.75, topology: Way = "two-phase") -> Strategy:
    """Each entry as -M, 0 or M in 1.6 bits and less; the rest stays in the residual."""
    return Strategy(compressor=ErrorFeedback(ThreeLC(sparsity)), topology=way(topology))
