"""ATOMO in its spectral form (Wang et al., NeurIPS 2018, arXiv 1806.04090).

On each worker r, for each matrix G of a gradient:                  here:
    G = sum_i s_i u_i v_i'                                          SampledSpectrum: torch's SVD
    p_i <- min(1, c s_i), c so that sum p_i = the budget            SampledSpectrum: `probabilities`
    send s_i / p_i, u_i, v_i with probability p_i                   SampledSpectrum: `rank` of them
    X <- X - lr * mean_r of the sums of what was sent               Flat: all-gather, then products

Right in the mean, no residual is kept. A decomposition of each matrix in each step takes long: `powersgd`
needs two products.

Differences from the paper: exactly `rank` directions are drawn, where its number is random; a convolution is
a matrix of its first dimension by all others; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.registry import algorithm
from tacit.compressors import SampledSpectrum
from tacit.strategy import Strategy
from tacit.topologies import Flat


@algorithm(
    family="low rank",
    paper="ATOMO: Wang et al. 2018, arXiv 1806.04090",
    compresses=True,
    changes="a few singular directions of each matrix, drawn by their size; no residual is kept",
    instead="powersgd",
)
def atomo(rank: int = 3) -> Strategy:
    """`rank` singular directions of each matrix, drawn so that the mean is right."""
    return Strategy(compressor=SampledSpectrum(rank=rank), topology=Flat())
