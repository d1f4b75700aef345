"""DeMo, decoupled momentum (Peng, Quesnelle & Kingma 2024, arXiv 2411.19870); DisTrO's first optimizer.

The algorithm on each worker r, as in the authors' code (github.com/bloc97/DeMo, demo.py):      here:
    m_r <- beta m_r + g_r                                       ErrorFeedback(decay=beta): its residual
    q_r <- the k largest coefficients of the DCT of each chunk  DCT, around TopK of each 4096
    m_r <- m_r - q_r                                            ErrorFeedback: what was not sent stays
    Q   <- mean_r(q_r)                                          Flat: all-gather, and one transform back
    x   <- x - lr * sign(Q)                                     SignOfMean; the user's SGD, without momentum

The learning rate is that of a sign method: every entry moves by it in every step. `chunk`, `k` and `decay`
are the defaults of the code. As there, what waits is in units of lr g, as the residual follows the rate.

Differences from the code: a transform is of 64 entries in a row, where it cuts matrices into tiles of 64 x 64
and transforms both ways; the 32 are of 64 such rows, as many as of a tile. A coefficient that only some ranks
have sent is divided by all ranks, not by these. Biases and norms are among the entries, as there.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import DCT, ErrorFeedback, SignOfMean, TopK
from tacit.strategy import Strategy
from tacit.topologies import Flat


@algorithm(
    family="sparsification",
    paper="DeMo: Peng, Quesnelle & Kingma 2024, arXiv 2411.19870",
    compresses=True,
    changes="the fastest parts of each rank's momentum travel, by a cosine transform; steps are signs",
)
def demo(k: int = 32, chunk: int = 64, decay: float = 0.999) -> Strategy:
    """Of each `chunk` x `chunk` coefficients the `k` largest are sent; for SGD without momentum."""
    checks.whole("chunk", chunk, 2, 4096, "write 64")
    checks.whole("k", k, 1, chunk * chunk, "write 32, of chunk=64")
    values = TopK(ratio=k / chunk**2, chunk=chunk**2)
    return Strategy(
        compressor=SignOfMean(ErrorFeedback(DCT(values, chunk), decay=decay)),
        topology=Flat(),
    )
