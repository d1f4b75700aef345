"""PowerSGD (Vogels, Karimireddy & Jaggi, NeurIPS 2019, arXiv 1905.13727).

The paper's algorithms 1 and 2, on each worker r:   here:
    D_r <- g_r + e_r                                ErrorFeedback: add the residual
    P <- mean_r(D_r Q); P <- orthogonalize(P)       PowerSGD.exchange: the first AllReduce
    Q <- mean_r(D_r' P)                             the second AllReduce; Q is kept (warm start)
    e_r <- D_r - P (D_r' P)'                        ErrorFeedback: what was not sent is the new residual
    x <- x - lr * (P Q' + momentum)                 the user's optimizer

Differences from the paper: momentum is the optimizer's own. Vectors are sent densely in the same messages.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import ErrorFeedback, PowerSGD
from tacit.strategy import Strategy


@algorithm(
    family="low rank",
    paper="PowerSGD: Vogels et al. 2019, arXiv 1905.13727",
    compresses=True,
    changes="each matrix travels as a product of two thin ones; the rest is sent later (error feedback)",
)
def powersgd(
    rank: int = 4, min_compression_rate: float = 2.0, topology: AdditiveWay = "auto", residual_bits: int = 32
) -> Strategy:
    """Every matrix as a product of two with `rank` columns; the rest stays in the residual."""
    inner = PowerSGD(rank=rank, min_compression_rate=min_compression_rate)
    return Strategy(compressor=ErrorFeedback(inner), topology=way(topology), residual_bits=residual_bits)
