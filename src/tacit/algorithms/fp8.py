"""Gradients in 8-bit floating point, with error feedback (formats: Micikevicius et al., arXiv 2209.05433).

On each worker r:                                   here:
    a_r <- g_r + e_r                                ErrorFeedback: add the residual
    s_r <- max |a_r| / largest number of the format FP8.encode: one scale a bucket
    q_r <- fp8(a_r / s_r)                           FP8.encode: round to nearest even
    e_r <- a_r - s_r q_r                            ErrorFeedback: what was not sent is the new residual
    x   <- x - lr * mean_r(s_r q_r)                 Auto: all-gather, then widen and add P messages

Where that sends less, and the second rounding adds little for it, each rank averages one slice for all and
sends the mean compressed too, with separate error feedback (Auto, TwoPhase). `topology=all-gather` sends it
as it is, `topology=two-phase` always so.

Differences from the paper: it describes the formats and scales per tensor, for all of training; here one
scale serves a bucket, only for the way between the ranks; and there is error feedback.
"""

from __future__ import annotations

from typing import Literal

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import FP8, ErrorFeedback
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="FP8 formats: Micikevicius et al. 2022, arXiv 2209.05433",
    compresses=True,
    changes="a byte an entry, in 8-bit floating point; the rest is sent later (error feedback)",
)
def fp8(format: Literal["e4m3", "e5m2"] = "e4m3", topology: Way = "auto") -> Strategy:
    """A byte an entry, finest where the entry is small; the rest stays in the residual."""
    compressor = ErrorFeedback(FP8(format=format))
    return Strategy(compressor=compressor, topology=way(topology))
