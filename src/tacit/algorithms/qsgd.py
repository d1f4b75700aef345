"""QSGD (Alistarh, Grubic, Li, Tomioka & Vojnovic, NeurIPS 2017, arXiv 1610.02132).

The paper's algorithm, on each worker r, for each bucket v of its gradient, with s levels:
                                                    here:
    xi_i <- l / s or (l + 1) / s, at random, where  QSGD.encode, s = 2^(bits - 1) - 1; the draw is a
        l <= s |v_i| / |v| <= l + 1                     function of seed, round, rank and entry
    Q_s(v_i) <- |v| sign(v_i) xi_i                  a level from -s to s in `bits` bits, |v| / s a bucket
    x   <- x - lr * mean_r(Q_s(g_r))                Auto: all-gather, then unpack and add P messages

Where that sends less, and the second rounding adds little for it, each rank averages one slice for all, and
the mean is rounded at random once more (Auto, TwoPhase): right in the mean still, and noisier, as the second
rounding is not averaged over the ranks. `topology=all-gather` rounds once, `topology=two-phase` always twice.

Differences from the paper: levels of fixed width where it has Elias's code, or with `entropy=true` another
code (ByteCoded), which leaves the numbers as they are; |v| is the largest magnitude,
as in its experiments (`scale=norm` is its theorem's); buckets are cut from a bucket, not from each
tensor; biases and norms are sent densely in the same message.
"""

from __future__ import annotations

from typing import Literal

from tacit.algorithms.options.codecs import coded
from tacit.algorithms.options.named_options import Way, way
from tacit.algorithms.registry import algorithm
from tacit.compressors import QSGD
from tacit.strategy import Strategy


@algorithm(
    family="quantization",
    paper="QSGD: Alistarh et al. 2017, arXiv 1610.02132",
    compresses=True,
    changes="a few levels an entry, rounded at random so that the mean is right; no residual is kept",
)
def qsgd(
    bits: int = 4,
    bucket: int = 512,
    topology: Way = "auto",
    scale: Literal["largest", "norm"] = "largest",
    entropy: bool = False,
) -> Strategy:
    """Levels of `bits` bits, rounded at random so that the mean is right; no residual is kept."""
    return Strategy(compressor=coded(QSGD(bits, bucket, scale), entropy), topology=way(topology))
