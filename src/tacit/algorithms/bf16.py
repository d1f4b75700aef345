"""Synchronous SGD with gradients rounded to bfloat16 on the wire (survey arXiv 2003.03009, quantization).

    x <- x - lr * mean_r(bf16(g_r))

No error feedback: the rounding error is relative to each entry, 2^-9 at most.

By `entropy=true` exponents are entropy coded (ByteCoded), and the same numbers arrive in about 0.7 of the
bytes. They do not add up on the way then: each rank averages a slice of them for all, in fp32, and sends the
mean in bfloat16 too.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import coded
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
def bf16(topology: AdditiveWay = "auto", entropy: bool = False) -> Strategy:
    """Half the bytes, at the range of fp32; works on Gloo, where torch's own hook refuses."""
    if entropy and topology == "auto":
        topology = "two-phase"
    return Strategy(compressor=coded(BF16(), entropy), topology=way(topology))
