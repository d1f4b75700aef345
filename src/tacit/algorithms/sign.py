"""EF-signSGD (Karimireddy, Rebjock, Stich & Jaggi, ICML 2019, arXiv 1901.09847).

The paper's algorithm, on each worker r:            here:
    p_r <- g_r + e_r                                ErrorFeedback: add what is owed
    D_r <- (|p_r|_1 / d) sign(p_r)                  Sign.encode: one bit an entry, one magnitude
    e_r <- p_r - D_r                                ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(D_r)                     Auto: all-gather, then unpack and add P messages

Where that sends less, as from 3 ranks on, each rank averages one stretch for all and sends the mean
compressed too, with error feedback of its own (Auto, TwoPhase). `topology=Flat()` sends it as it is.

Differences from the paper: the learning rate is applied after the mean, by the optimizer, not before the
compression; one magnitude for all tensors of a lot; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.compressors.sign import Sign
from tacit.compressors.wrappers import ErrorFeedback
from tacit.strategy import Strategy


def sign() -> Strategy:
    """One bit an entry; the rest is owed."""
    return Strategy(compressor=ErrorFeedback(Sign()), name="sign")
