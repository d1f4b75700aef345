"""Natural dithering (Horvath, Ho, Horvath, Sahu, Canini & Richtarik, MSML 2022, arXiv 1905.10988).

The paper's operator D of s levels and the norm p = infinity, on each worker r, for each bucket v:
                                                    here:
    D(v_i) <- |v| sign(v_i) xi_i, where xi_i is     NaturalDithering, s = 2^(bits - 1) - 1; the draw is a
        0, 2^(1 - s), ..., 1/2 or 1, one of the         function of seed, round, rank and entry
        two next to |v_i| / |v|, at random
    x    <- x - lr * mean_r(D(g_r))                 Auto: all-gather, then unpack and add P messages

Where that sends less, and the second rounding adds little for it, the mean is rounded at random once more
(Auto, TwoPhase). Differences from the paper: buckets of 512 entries, not tensors, share a norm; levels have a
fixed number of bits; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import NaturalDithering
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="Natural dithering: Horvath et al. 2022, arXiv 1905.10988",
    compresses=True,
    changes="a few powers of two below the largest magnitude, at random; no residual is kept",
    instead="qsgd",
)
def natural_dithering(bits: int = 4, bucket: int = 512, topology: Way = "auto") -> Strategy:
    """Powers of two of `bits` bits, rounded at random so that the mean is right; no residual is kept."""
    return Strategy(compressor=NaturalDithering(bits=bits, bucket=bucket), topology=way(topology))
