"""EF21-SGDM (Fatkhullin, Tyurin & Richtarik, NeurIPS 2023, arXiv 2305.15155), on EF21 (arXiv 2106.05203).

The algorithm on each worker r:                             here:
    v_r <- (1 - eta) v_r + eta * grad_r(x)                  MomentumCorrection(1 - eta): `velocity` is v / eta
    c_r <- C(v_r - g_r)                                     EF21, around TopK
    g_r <- g_r + c_r;  g <- g + mean_r(c_r)                 EF21: its states `known` and `answer`
    x   <- x - gamma * g                                    the user's SGD, whose learning rate is gamma / eta

The optimizer must be SGD; its momentum is taken over while the strategy is attached, so `momentum` is that of
SGD, and the learning rate is that of SGD with momentum. With `momentum` near 0 it is EF21.

Differences from the paper: momentum is SGD's sum, not an average, which is another unit of the learning rate;
g_r begins at 0, where it begins at the first gradient; the k entries are chosen over a whole bucket; biases
and norms are sent densely, with momentum. Of the paper the abstract was
read, and the algorithm in accounts of it.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import EntryValues, values_of
from tacit.algorithms.registry import algorithm
from tacit.compressors import EF21, MomentumCorrection, TopK
from tacit.strategy import Strategy
from tacit.topologies import Flat


@algorithm(
    family="sparsification",
    paper="EF21-SGDM: Fatkhullin et al. 2023, arXiv 2305.15155",
    compresses=True,
    changes="the largest differences of the momentum to what the others know of it travel",
)
def ef21_sgdm(ratio: float = 0.01, momentum: float = 0.9, values: EntryValues = "fp32") -> Strategy:
    """The largest differences to each rank's last estimate are sent; takes over the optimizer's momentum."""
    inner = EF21(TopK(ratio=ratio, values=values_of(values, None)))
    return Strategy(compressor=MomentumCorrection(inner, momentum, masking=False), topology=Flat())
