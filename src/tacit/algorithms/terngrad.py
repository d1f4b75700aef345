"""TernGrad (Wen, Xu, Yan, Wu, Wang, Chen & Li, NeurIPS 2017, arXiv 1705.07878).

The paper's algorithm, on each worker r:            here:
    g_r <- clip(g_r, -c sigma, c sigma), c = 2.5    TernGrad.encode, for each bucket of 512 entries
    s_r <- max |g_r|                                TernGrad.encode: one number a bucket
    b_r <- 1 with probability |g_r| / s_r, else 0   TernGrad.encode; the draw is a function of seed, round,
                                                        rank and entry
    x   <- x - lr * mean_r(s_r sign(g_r) b_r)       Auto: all-gather, then unpack and add P messages

Where that sends less, and the second rounding adds little for it, each rank averages one slice for all, and
the mean is rounded at random once more (Auto, TwoPhase): right in the mean still, and noisier, as the second
rounding is not averaged over the ranks. `topology=all-gather` rounds once, `topology=two-phase` always twice.

Differences from the paper: a bucket of 512 entries where it has a layer; sigma counts from zero; no sharing
of scalers, as the mean is taken of decoded numbers; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import TernGrad
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="TernGrad: Wen et al. 2017, arXiv 1705.07878",
    compresses=True,
    changes="plus, minus or nothing, at random; no residual is kept",
    instead="qsgd",
)
def terngrad(clip: float | None = 2.5, topology: Way = "auto") -> Strategy:
    """Two bits an entry: a scale, its negative or nothing, at random; no residual is kept."""
    return Strategy(compressor=TernGrad(clip=clip), topology=way(topology))
