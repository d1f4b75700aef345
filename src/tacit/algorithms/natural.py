"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini & Richtarik, MSML 2022, arXiv 1905.10988).

The paper's algorithm, on each worker r, for each entry t of its gradient, with 2^a <= |t| < 2^(a + 1):
                                                    here:
    C(t) <- sign(t) 2^a with probability            Natural.encode: random bits are added below the
        (2^(a + 1) - |t|) / 2^a,                        exponent; what carries into it is the bucket
        else sign(t) 2^(a + 1)
    x    <- x - lr * mean_r(C(g_r))                 Auto: all-gather, then put together and add P messages

Where that sends less, and the second rounding adds little for it, each rank averages one slice for all, and
the mean is rounded at random once more (Auto, TwoPhase): right in the mean still, and noisier, as the second
rounding is not averaged over the ranks. `topology=all-gather` rounds once, `topology=two-phase` always twice.

Differences from the paper: 2^127 is the largest power.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import Natural
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="Natural compression: Horvath et al. 2022, arXiv 1905.10988",
    compresses=True,
    changes="sign and a power of two for each entry, at random: 9 bits; no residual is kept",
    instead="int8",
)
def natural(topology: Way = "auto") -> Strategy:
    """Nine bits an entry: its sign and a power of two next to it, at random; no residual is kept."""
    return Strategy(compressor=Natural(), topology=way(topology))
