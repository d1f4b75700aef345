"""Pipe-SGD (Li, Yu, Li, Avestimehr, Kim & Schwing, NeurIPS 2018, arXiv 1811.03619).

The paper's algorithm 1, on each worker, with pipeline width K = 2:  here:
    for t = 1 .. T:
        wait until the sum of gradients t - K is there               DelayedMeans.begin, at the first bucket
        w_t <- w_(t-1) - lr * that sum / P                           DelayedMeans.swap_; the optimizer
        load a batch; forward, backward: local gradient at w_t       the user's loop
        mark it as ready                                             DelayedMeans.swap_, bucket by bucket
    communication thread: wait until a local gradient is ready;      the lane
        AllReduce it, compressed, into the sum                       Flat; Dense, or the compressor
    warm-up: the first epochs by synchronous SGD                     Delayed(1, warmup_steps)
    compression: truncation to 16 bits, quantization to 8            BF16, Int8

So an exchange has the time from one backward to the next to be hidden, optimizer and forward pass included.

Differences from the paper: K is 2, which it finds best, and no other; a gradient leaves bucket by bucket, not
when all of it is there; a step waits for the mean when its backward begins, not its forward pass, and applies
it at its end, which gives the same sequence: w_{t+1} = w_t - lr g_{t-1}. The warm-up is in steps, and the
first step is always synchronous, so that nothing need stand in for gradients before the first; the mean of
the last synchronous step is so applied twice. The gradient of the very last step is not applied.

It asks for a smaller learning rate, and with momentum for a much smaller one: on a quadratic of curvature c,
SGD with momentum m is stable for lr < 2 (1 + m) / c, and a step late for lr < (1 - m) / c. That is half of it
without momentum, and a 38th with m = 0.9.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.named_options import FEW_BITS, AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.overlap import Delayed
from tacit.strategy import Strategy


@algorithm(
    family="delayed",
    paper="Pipe-SGD: Li et al. 2018, arXiv 1811.03619",
    compresses=False,
    changes="gradients travel during the next step, which applies the mean of the step before it",
)
def pipesgd(
    warmup_steps: int = 0,
    compressor: Literal["none", "bf16", "int8"] = "none",
    topology: AdditiveWay = "auto",
) -> Strategy:
    """Gradients travel during the next step, which applies the mean of the step before it."""
    checks.one_of("compressor", compressor, list(FEW_BITS))
    return Strategy(
        overlap=Delayed(1, warmup_steps=warmup_steps),
        compressor=FEW_BITS[compressor](),
        topology=way(topology),
    )
