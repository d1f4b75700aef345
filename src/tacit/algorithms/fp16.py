"""Synchronous SGD with gradients in half precision on the wire (survey arXiv 2003.03009, quantization).

    x <- x - lr * mean_r(fp16(g_r))

No error feedback: the rounding error is relative to each entry, 2^-12 at most, from 6e-5 to 65504. Beyond
that is infinity, and a round that fails; smaller entries lose bits.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import FP16
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="survey: Ouyang et al. 2020, arXiv 2003.03009",
    compresses=True,
    changes="gradients travel in half precision: half the bytes",
)
def fp16(topology: AdditiveWay = "auto") -> Strategy:
    """Half the bytes, eight times as fine as bf16, in a range where a gradient must fit."""
    return Strategy(compressor=FP16(), topology=way(topology))
