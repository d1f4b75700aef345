"""Signs with a magnitude for each block (dist-EF-blockSGD: Zheng et al., NeurIPS 2019, arXiv 1905.10936).

The paper's algorithm, on each worker r:            here:
    p_r <- g_r + e_r                                ErrorFeedback: add the residual
    D_r <- (|p_r,b|_1 / d_b) sign(p_r,b), block b   Sign(block=512).encode: one bit an entry, a mean a block
    e_r <- p_r - D_r                                ErrorFeedback: what was not sent is the new residual
    p   <- mean_r(D_r) + e                          TwoPhase: the mean, by the rank whose slice it is
    D   <- the same of p;  e <- p - D               the mean is compressed too: the paper's server
    x   <- x - lr * D                               the optimizer

Both residuals are multiplied by lr_{t-1} / lr_t, as in the paper's algorithm 2 (`ErrorFeedback.rescale`). By
`topology=all-gather` the mean arrives as it is.

Differences from the paper: blocks are of 512 entries, not of a layer each; zeros stay zeros, and a block with
some sends half of its entries in a round; momentum is the optimizer's. `sign` has one magnitude a bucket.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, Sign
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="dist-EF-blockSGD: Zheng et al. 2019, arXiv 1905.10936",
    compresses=True,
    changes="one bit an entry and a magnitude for each 512; the rest is sent later (error feedback)",
)
def efsign(topology: Way = "two-phase", residual_bits: int = 32) -> Strategy:
    """One bit an entry, and a magnitude for each 512; the rest stays in the residual."""
    return Strategy(
        compressor=ErrorFeedback(Sign(block=512)), topology=way(topology), residual_bits=residual_bits
    )
