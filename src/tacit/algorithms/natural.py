"""Natural compression (Horvath, Ho, Horvath, Sahu, Canini & Richtarik, MSML 2022, arXiv 1905.10988).

The paper's algorithm, on each worker r, for each entry t of its gradient, with 2^a <= |t| < 2^(a + 1):
                                                    here:
    C(t) <- sign(t) 2^a with probability            Natural.encode: random bits are added below the
        (2^(a + 1) - |t|) / 2^a,                        exponent; what carries into it is the lot
        else sign(t) 2^(a + 1)
    x    <- x - lr * mean_r(C(g_r))                 Flat: all-gather, then put together and add P messages

Differences from the paper: the mean is not compressed a second time on its way back; 2^127 is the largest
power.
"""

from __future__ import annotations

from tacit.compressors.natural import Natural
from tacit.strategy import Strategy


def natural() -> Strategy:
    """Nine bits an entry: its sign and a power of two next to it, by lot; nothing is owed."""
    return Strategy(compressor=Natural(), name="natural")
