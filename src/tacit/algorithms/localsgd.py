"""Local SGD (Stich, ICLR 2019; Zinkevich 2010; Lin et al., ICLR 2020).

The paper's algorithm, on each worker r:            here:
    x_r <- x_r - lr * g_r                           the user's optimizer; no gradient travels
    every H steps: x_r <- mean_r(x_r)               Every(sync_every=H), Average

What travels is the delta x_r - x since the last anchor x, not x_r itself. In exact arithmetic the mean is the
same. With a compressor it is far better, as the delta is small where parameters are not: `bits=16` sends it
in bf16, 2 to 8 in QSGD's levels. The optimizer's own state (momentum, Adam's moments) stays local, as in the
paper, unless `momentum` says otherwise: "averaged" in every round (Yu, Jin & Yang, ICML 2019), or "reset" to
zero. `variance=scaled` has Adam go by the variance of the mean gradient.

The paper's round is of all parameters as they are after H steps, and the next step begins from the mean: none
of it can leave before, and training waits for all of it. With `fragments=F` one of F parts of the model has a
round every H / F steps, so each is averaged every H steps at its own time, and replicas are never equal as a
whole before `sync` and the end: another arithmetic than the paper's, after Streaming DiLoCo (Douillard et al.
2025). With `fragment_sync_delay=D` a part's mean is applied D steps later, on top of what the replica has
done since (CoCoD-SGD: Shen et al., IJCAI 2019), and training waits only for what takes longer than D steps.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.options.named_options import AdditiveWay, staggered, way
from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.strategy import Buffers, MomentumUse, Strategy, Variance


@algorithm(
    family="periodic",
    paper="Stich 2019, arXiv 1805.09767",
    compresses=False,
    changes="no gradient travels; the replicas are averaged every few steps",
)
def localsgd(
    sync_every: int = 8,
    momentum: MomentumUse = "local",
    buffers: Buffers = "averaged",
    bits: int = 32,
    topology: AdditiveWay = "auto",
    fragments: int = 1,
    fragment_sync_delay: int = 0,
    variance: Variance = "local",
) -> Strategy:
    """Average the replicas every `sync_every` steps, and exchange nothing in between."""
    rounds, overlap = staggered(sync_every, fragments, fragment_sync_delay)
    return Strategy(
        subject="delta",
        rounds=rounds,
        compressor=of_bits(bits),
        topology=way(topology),
        overlap=overlap,
        merge=Average(),
        momentum=momentum,
        buffers=buffers,
        variance=variance,
    )
