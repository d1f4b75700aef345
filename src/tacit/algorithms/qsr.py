"""QSR, the quadratic synchronization rule (Gu, Lyu, Arora, Zhang & Huang, ICLR 2024, arXiv 2310.14423).

The paper's rule, for the round that begins at step t:       here:
    H = max(H_base, floor((alpha / lr_t)^2)) local steps     ByLearningRate(sync_every=H_base, alpha)
    then x_r <- mean_r(x_r)                                  Average, of deltas; `bits` as in `localsgd`

The less the replicas move in a step, the more steps they may take alone. The paper finds that they generalise
better so, with ResNets and with ViTs by AdamW, as long as the learning rate falls; with a constant one it is
local SGD. Without `alpha` the period is `sync_every` at the largest rate so far, and grows by the inverse
square from there. In the first round, and while the rate rises as in a warm-up, it is `sync_every` with any
`alpha`: by the small rates of a warm-up replicas would part at once. `longest` bounds it, as tacit is not
told when training ends; the steps after the last round are averaged by `session.sync()`, and as the session
closes.
"""

from __future__ import annotations

from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.merges import Average
from tacit.rounds import ByLearningRate
from tacit.strategy import MomentumUse, Strategy, Variance


@algorithm(
    family="periodic",
    paper="QSR: Gu et al. 2024, arXiv 2310.14423",
    compresses=False,
    changes="the replicas are averaged every few steps, and more seldom as the learning rate falls",
)
def qsr(
    sync_every: int = 4,
    alpha: float | None = None,
    longest: int = 128,
    momentum: MomentumUse = "local",
    bits: int = 32,
    topology: AdditiveWay = "auto",
    variance: Variance = "local",
) -> Strategy:
    """Local SGD whose period begins at `sync_every` and grows by the inverse square of the learning rate."""
    return Strategy(
        subject="delta",
        rounds=ByLearningRate(sync_every, alpha, longest),
        compressor=of_bits(bits),
        topology=way(topology),
        merge=Average(),
        momentum=momentum,
        variance=variance,
    )
