"""Synchronous SGD (BSP): every replica averages its gradients with all others in every step.

    x <- x - lr * mean_r(g_r)

`ddp` is torch's own DistributedDataParallel, untouched: the honest baseline. `dense` says the same through
tacit, to check the machinery: on the same buckets the two agree to the last bit where the number of ranks
is a power of two.
"""

from __future__ import annotations

from tacit.strategy import Strategy


def ddp() -> Strategy:
    """Plain DDP, untouched."""
    return Strategy(subject="nothing", name="ddp")


def dense() -> Strategy:
    """What DDP does, through tacit."""
    return Strategy(name="dense")
