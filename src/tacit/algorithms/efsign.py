"""Signs with a magnitude for each block (dist-EF-blockSGD: Zheng et al., NeurIPS 2019, arXiv 1905.10936).

The paper's algorithm, on each worker r:            here:
    p_r <- g_r + e_r                                ErrorFeedback: add what is owed
    D_r <- (|p_r,b|_1 / d_b) sign(p_r,b), block b   Sign(block=512).encode: one bit an entry, a mean a block
    e_r <- p_r - D_r                                ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(D_r)                     Auto: all-gather, then unpack and add P messages

Where that sends less, as from 3 ranks on, the mean is compressed a second time on its way back, with a
residual of its own at the rank that took the mean: the paper's server, one stretch of the tensor each (Auto,
TwoPhase). `topology=Flat()` sends it as it is.

Differences from the paper: blocks are of 512 entries, not of a layer each; the residual is not rescaled where
the learning rate changes, as it is in units of the gradient here; momentum is the optimizer's. `sign` has
one magnitude a lot.
"""

from __future__ import annotations

from tacit.compressors.sign import Sign
from tacit.compressors.wrappers import ErrorFeedback
from tacit.strategy import Strategy


def efsign() -> Strategy:
    """One bit an entry, and a magnitude for each 512; the rest is owed."""
    return Strategy(compressor=ErrorFeedback(Sign(block=512)), name="efsign")
