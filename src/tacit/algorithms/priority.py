"""Priority (P3: Jayarajan et al., MLSys 2019; ByteScheduler: Peng et al., SOSP 2019).

Both papers:                                                         here:
    cut gradients into slices of one size, and join small ones       cut or joined to `megabytes`
    of the slices that are there, send the one first that the        messages.by_priority: once, by a clock
    next forward pass needs first
    have no more under way than a credit of bytes (ByteScheduler)    `credit`
    each layer's forward waits for its own slices                    ForwardSteps

Differences from the papers: the order is planned once, from what rank 0 has seen in five steps, and equal
on all ranks, as collectives must be; and a gradient of which something is kept (a residual), or which its
compressor needs whole, is not cut. Each layer is stepped when its mean is there, with the options that the
optimizer had at `optimizer.step`.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.named_options import FEW_BITS, AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.overlap import Prioritized
from tacit.strategy import Strategy


@algorithm(
    family="scheduled",
    paper="P3: Jayarajan et al. 2019, arXiv 1905.03960; ByteScheduler: Peng et al. 2019",
    compresses=False,
    changes="gradients that the next forward pass needs first travel first, the others while it is under way",
)
def priority(
    megabytes: float | None = None,
    credit: float | None = None,
    compressor: Literal["none", "bf16", "int8"] = "none",
    topology: AdditiveWay = "auto",
) -> Strategy:
    """Gradients that the next forward pass needs first travel first, the others while it is under way."""
    checks.one_of("compressor", compressor, list(FEW_BITS))
    return Strategy(
        overlap=Prioritized(megabytes, credit),
        compressor=FEW_BITS[compressor](),
        topology=way(topology),
    )
