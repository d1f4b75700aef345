"""Synchronous SGD (BSP): every replica averages its gradients with all others in every step.

    x <- x - lr * mean_r(g_r)

`ddp` is torch's own DistributedDataParallel, untouched: the honest baseline. `dense` makes the same exchange
through tacit, to check it: on the same buckets the two agree to the last bit where the number of ranks
is a power of two.
"""

from __future__ import annotations

from tacit.algorithms.options.named_options import AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.strategy import Strategy


@algorithm(
    family="synchronous",
    paper="PyTorch Distributed: Li et al., VLDB 2020, arXiv 2006.15704",
    compresses=False,
    changes="nothing: PyTorch's own DDP, the baseline",
)
def ddp() -> Strategy:
    """Plain DDP, untouched."""
    return Strategy(subject="nothing")


@algorithm(
    family="synchronous",
    paper="survey: Ouyang et al. 2020, arXiv 2003.03009",
    compresses=False,
    changes="nothing in the result: DDP's exchange, made by tacit",
)
def dense(topology: AdditiveWay = "auto") -> Strategy:
    """What DDP does, through tacit."""
    return Strategy(topology=way(topology))
