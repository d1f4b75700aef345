"""Gradients in 8-bit integers by blocks (after Dettmers, ICLR 2016, arXiv 1511.04561), with error feedback.

On each worker r, for each block b of 512 entries:  here:
    a_r <- g_r + e_r                                ErrorFeedback: add the residual
    s_r <- max |a_r| / 127                          Int8.encode: one unit a block
    q_r <- round(a_r / s_r)                         Int8.encode: one byte an entry
    e_r <- a_r - s_r q_r                            ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * mean_r(s_r q_r)                 Auto: all-gather, then multiply and add P messages

Where that sends less, and the second rounding adds little for it, each rank averages one slice for all and
sends the mean compressed too, with separate error feedback (Auto, TwoPhase). `topology=all-gather` sends it
as it is, `topology=two-phase` always so.

By `entropy=true` the same numbers travel in fewer bytes (ByteCoded).

Differences from the paper: equal steps in place of its dynamic tree, a scale for each block in place of one
for each matrix, and error feedback; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import coded
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, Int8
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="after Dettmers 2016, arXiv 1511.04561",
    compresses=True,
    changes="a byte an entry, in equal steps of a block's range; the rest is sent later (error feedback)",
)
def int8(topology: Way = "auto", entropy: bool = False, residual_bits: int = 32) -> Strategy:
    """A byte an entry, in equal steps of each block's range; the rest stays in the residual."""
    return Strategy(
        compressor=ErrorFeedback(coded(Int8(), entropy)), topology=way(topology), residual_bits=residual_bits
    )
