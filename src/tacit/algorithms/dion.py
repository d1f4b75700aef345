"""Dion, distributed orthonormalized updates (Ahn, Xu, Abreu & Langford 2025, arXiv 2504.05295).

The algorithm, for a matrix X of m x n, in the compressed data-parallel form of the authors' code
(github.com/microsoft/dion, dion_reference.py), on each worker r:        here:
    B_r <- M_r + G_r                                            ErrorFeedback: the residual is the momentum
    P   <- orthogonal(mean_r(B_r Q))                            Dion: the first all-reduce
    R   <- mean_r(B_r' P)                                       Dion: the second
    M_r <- B_r - (1 - mu) P R'                                  ErrorFeedback, by what Dion says it has sent
    Q   <- the columns of R, each of norm 1                     Dion: its state `q`
    X   <- X - lr sqrt(m / n) P Q'                              Dion: the answer; the user's SGD

The optimizer is SGD without momentum; weight decay is its own. Biases and norms come as their mean gradient:
give them a group with another learning rate, as the authors give them another optimizer.

Differences from the code: P is orthogonalized by Gram-Schmidt, not by a randomized Cholesky QR; a column of
Q whose R is zero stays what it was; Q is kept in fp32 or wider; a matrix is never sent whole, also where the
rank saves nothing. Where replicas are saved, each rank's momentum is its own, as in the code before its
`synchronize_for_checkpoint`.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import Dion, ErrorFeedback
from tacit.strategy import Strategy


@algorithm(
    family="low rank",
    paper="Dion: Ahn et al. 2025, arXiv 2504.05295",
    compresses=True,
    changes="orthonormal steps, as Muon's, of low rank; each rank keeps momentum of its own",
)
def dion(rank: int = 32, momentum: float = 0.95) -> Strategy:
    """Orthonormal steps of low rank, of momentum that no rank sends whole; for SGD without momentum."""
    return Strategy(compressor=ErrorFeedback(Dion(rank=rank, momentum=momentum), rescale=False))
