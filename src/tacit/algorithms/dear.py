"""DeAR (Zhang et al., ICDCS 2023, arXiv 2302.12445): an all-reduce whose halves hide behind different passes.

The paper:                                                           here:
    decouple each all-reduce into a reduce-scatter and an            Decoupled
    all-gather
    BackPipe: reduce-scatters leave while backward goes on, layer    Prioritized(split=True), LayerwiseHook
    by layer from the last
    FeedPipe: all-gathers leave while the next forward pass goes     exchange.two_jobs, ForwardSteps
    on, from the first layer on, and each layer waits for its own
    join tensors to messages whose size is tuned (Bayesian           cut or joined to `megabytes`, by what the
    optimization)                                                    links have shown

Differences from the paper: the optimizer's step of a layer is taken when its mean is there, with the options
that the optimizer had at `optimizer.step`; and sizes are planned from measured links, and not searched for.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.named_options import ADDED_UP
from tacit.algorithms.registry import algorithm
from tacit.overlap import Prioritized
from tacit.strategy import Strategy
from tacit.topologies import Decoupled


@algorithm(
    family="scheduled",
    paper="DeAR: Zhang et al. 2023, arXiv 2302.12445",
    compresses=False,
    changes="gradients are added up during backward, and sums come back during the next forward pass",
)
def dear(
    megabytes: float | None = None,
    credit: float | None = None,
    compressor: Literal["none", "bf16"] = "none",
) -> Strategy:
    """Reduce-scatters travel during backward, all-gathers during the next forward pass."""
    checks.one_of("compressor", compressor, list(ADDED_UP))
    return Strategy(
        overlap=Prioritized(megabytes, credit, split=True),
        compressor=ADDED_UP[compressor](),
        topology=Decoupled(),
    )
