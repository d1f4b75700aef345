"""Synchronous SGD with gradients rounded to bfloat16 on the wire (survey arXiv 2003.03009, quantization).

    x <- x - lr * mean_r(bf16(g_r))

No error feedback: the rounding error is relative to each entry, 2^-9 at most.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import BF16
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="survey: Ouyang et al. 2020, arXiv 2003.03009",
    compresses=True,
    changes="gradients travel as bfloat16: half the bytes",
)
def bf16(topology: AdditiveWay = "auto") -> Strategy:
    """Half the bytes, at the range of fp32; works on Gloo, where torch's own hook refuses."""
    return Strategy(compressor=BF16(), topology=way(topology))
