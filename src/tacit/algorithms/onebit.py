"""1-bit SGD (Seide, Fu, Droppo, Li & Yu, Interspeech 2014).

The paper's algorithm, on each worker r:            here:
    a_r <- g_r + e_r                                ErrorFeedback: add what is owed
    q_r <- [a_r >= 0]                               OneBit.encode: one bit an entry
    u_r, l_r <- mean of a_r where q_r is 1, is 0    OneBit.encode: two values a block
    e_r <- a_r - (u_r if q_r else l_r)              ErrorFeedback: keep what was not sent
    x   <- x - lr * mean_r(u_r if q_r else l_r)     Auto: all-gather, then unpack and add P messages

Where that sends less, as from 3 ranks on, each rank averages one stretch for all and sends the mean
compressed too, with error feedback of its own: the paper's second quantization (Auto, TwoPhase).
`topology=Flat()` sends it as it is.

Differences from the paper: two values for each 512 entries, not for each column of a matrix; no AdaGrad
before the quantization; biases and norms are sent densely. The paper starts with unquantized steps where the
first ones are large.
"""

from __future__ import annotations

from tacit.compressors.onebit import OneBit
from tacit.compressors.wrappers import ErrorFeedback
from tacit.strategy import Strategy


def onebit() -> Strategy:
    """One bit an entry, and the mean of each side; the rest is owed."""
    return Strategy(compressor=ErrorFeedback(OneBit()), name="onebit")
