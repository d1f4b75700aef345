"""DiLoCo (arXiv 2311.08105), Streaming DiLoCo (arXiv 2501.18512) and eager DiLoCo (arXiv 2502.12996).

DiLoCo's algorithm 1, for each outer step t, on worker r:          here:
    theta_r <- theta^(t-1)                                         OuterStep: parameters become the anchor
    H steps of the inner optimizer (AdamW)                         the user's optimizer
    delta = mean_r (theta^(t-1) - theta_r)                         the round: minus the mean delta
    theta^(t) <- OuterOpt(theta^(t-1), delta), Nesterov            OuterStep(lr, momentum), as torch's SGD

Streaming DiLoCo does so for one fragment p at a time:             here:
    fragment p has a round every H steps, offset from the others   Every(H, fragments=P)
    its outer gradient travels while training goes on for tau      Delayed(tau)
    theta_p <- alpha * theta_p + (1 - alpha) * new theta_p         OuterStep(local=alpha)
    the outer gradients travel in 4 bits                           any compressor of ours: qsgd by `bits`

Eager DiLoCo (Kale, Douillard & Donchev), at the end of period t, on worker r of P:     here:
    delta_r^t <- theta_r - the H steps of this period              the round, which is under way for H steps
    g <- delta_r^t / P + sum_(s not r) delta_s^(t-1) / P           EagerStep: its own part at once, and the
    theta_r <- OuterOpt(theta_r, g)                                    mean of period t - 1, which has come

It differs in the outer momentum: one for all, of means that have come, so that a worker's own part of the
newest delta enters it a period later. `outer_momentum` is ours: on a quadratic of which a period goes more
than half the way 0.9 diverges from 4 replicas on, as every mean comes late. Of the paper the abstract and
accounts were read.

Differences of the others: fragments are neighbouring parameters of about equal size ("sequential"; the paper
strides over layers). 4-bit values are QSGD's, equal steps of a bucket's norm rounded at random, where the
paper has E3M0. From 3 ranks on, where that sends less, the mean is rounded once more when it is sent (Auto,
TwoPhase); `topology=all-gather` rounds once, as in the paper. The inner optimizer's state stays local and is
not reset, as in the papers. Closing the session, and `sync`, take the mean of the replicas as they are,
without an outer step.

DiLoCo's round is of all parameters as they are after H steps, and the next step begins from its answer: none
of it can leave before, and training waits for all of it. Who would rather not wait has `streaming_diloco`:
with `fragment_update_alpha=0` and `fragment_sync_delay=0` it is DiLoCo fragment by fragment, each at its own
time, and with a delay fragments travel during the steps.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.options.codecs import of_bits
from tacit.algorithms.options.named_options import AdditiveWay, staggered, way
from tacit.algorithms.registry import algorithm
from tacit.merges import EagerStep, OuterStep
from tacit.overlap import Delayed
from tacit.rounds import Every
from tacit.strategy import Strategy


@algorithm(
    family="periodic",
    paper="DiLoCo: Douillard et al. 2023, arXiv 2311.08105",
    compresses=False,
    changes="an outer optimizer steps by the replicas' mean progress, every few dozen steps",
)
def diloco(
    sync_every: int = 32,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    bits: int = 32,
    topology: AdditiveWay = "auto",
    anchor_bits: int = 32,
) -> Strategy:
    """An outer SGD with Nesterov momentum steps by the mean delta of `sync_every` inner steps."""
    _check(outer_lr, outer_momentum)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=of_bits(bits),
        topology=way(topology),
        merge=OuterStep(outer_lr, outer_momentum),
        anchor_bits=anchor_bits,
    )


@algorithm(
    family="periodic",
    paper="Streaming DiLoCo: Douillard et al. 2025, arXiv 2501.18512",
    compresses=True,
    changes="DiLoCo in fragments that take turns, travel in 4 bits, and land some steps late",
)
def streaming_diloco(
    sync_every: int = 32,
    fragments: int = 4,
    fragment_sync_delay: int = 5,
    fragment_update_alpha: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    bits: int = 4,
    topology: AdditiveWay = "auto",
    anchor_bits: int = 32,
) -> Strategy:
    """DiLoCo in fragments that take turns, and are applied `fragment_sync_delay` steps late."""
    _check(outer_lr, outer_momentum)
    rounds, overlap = staggered(sync_every, fragments, fragment_sync_delay)
    hint = "it is how much a replica keeps of its own; write 0.5"
    checks.real("fragment_update_alpha", fragment_update_alpha, hint, least=0, below=1)
    return Strategy(
        subject="delta",
        rounds=rounds,
        compressor=of_bits(bits),
        topology=way(topology),
        overlap=overlap,
        merge=OuterStep(outer_lr, outer_momentum, local=fragment_update_alpha),
        anchor_bits=anchor_bits,
    )


@algorithm(
    family="periodic",
    paper="Eager DiLoCo: Kale et al. 2025, arXiv 2502.12996",
    compresses=False,
    changes="DiLoCo that does not wait: a replica steps by its part of a mean, a period later by the rest",
)
def eager_diloco(
    sync_every: int = 32,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    bits: int = 32,
    topology: AdditiveWay = "auto",
    anchor_bits: int = 32,
) -> Strategy:
    """DiLoCo whose deltas travel for a whole period; each replica steps at once by its part of the mean."""
    _check(outer_lr, outer_momentum)
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=of_bits(bits),
        topology=way(topology),
        overlap=Delayed(sync_every),
        merge=EagerStep(outer_lr, outer_momentum, period=sync_every),
        anchor_bits=anchor_bits,
    )


def _check(outer_lr: float, outer_momentum: float) -> None:
    checks.real("outer_lr", outer_lr, "write 0.7", above=0)
    checks.real("outer_momentum", outer_momentum, "write 0.9, or 0 for none", least=0, below=1)
