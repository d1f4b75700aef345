"""1-bit SGD (Seide, Fu, Droppo, Li & Yu, Interspeech 2014).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add the residual
    q_r <- [a_r >= 0]                               OneBit.encode: one bit an entry
    u_r, l_r <- mean of a_r where q_r is 1, is 0    OneBit.encode: two values a block
    e_r <- a_r - (u_r if q_r else l_r)              ErrorFeedback: what was not sent is the new residual
    the mean, quantized again in the same way       TwoPhase: each rank averages one slice for all, and
                                                    sends it compressed too, with separate error feedback
    x   <- x - lr * (what came back)                the optimizer

By `topology=all-gather` the mean arrives as it is.

Differences from the paper: two values for each 512 entries, not for each column of a matrix; zeros stay
zeros, and a block with some sends half of its entries in a round; no AdaGrad before the quantization; biases
and norms are sent densely. The paper starts with unquantized steps where the first ones are large.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, OneBit
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="1-bit SGD: Seide et al. 2014, doi 10.21437/Interspeech.2014-274",
    compresses=True,
    changes="one bit an entry, and two means for each 512; the rest is sent later (error feedback)",
    instead="efsign",
)
def onebit(topology: Way = "two-phase") -> Strategy:
    """One bit an entry, and the mean of each side; the rest stays in the residual."""
    return Strategy(compressor=ErrorFeedback(OneBit()), topology=way(topology))
