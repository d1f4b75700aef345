"""MG-WFBP (Shi, Chu & Li, INFOCOM 2019, arXiv 1811.11141), and gradients as soon as backward has them.

The paper:                                                           here:
    measure t(m) = a + b m of an all-reduce of m bytes               MessagePlanner, probing.ring_cost
    measure when backward has each layer's gradient                  LayerwiseHook.times
    from the last layer to the first: join a layer with the one      foresight.messages.merged: all ways to
    before it if that is ready before the link has begun with it,    cut are compared, as waits that are short
    or within a of that (theorem 1, algorithm 1)                     one by one can add up
    send each joined message when all of its gradients are there     LayerwiseHook

Differences from the paper: times are the median of five steps of rank 0, after three that are left out; the
bytes of encoded messages count as they are on the wire; and the means are given back when backward ends.
"""

from __future__ import annotations

from typing import Literal

from tacit import checks
from tacit.algorithms.options.named_options import FEW_BITS, AdditiveWay, way
from tacit.algorithms.registry import algorithm
from tacit.overlap import Fused
from tacit.strategy import Strategy


@algorithm(
    family="scheduled",
    paper="MG-WFBP: Shi, Chu & Li 2019, arXiv 1811.11141",
    compresses=False,
    changes="gradients leave layer by layer, joined where a plan of the first steps says that it saves time",
)
def fusion(
    megabytes: float | None = None,
    compressor: Literal["none", "bf16", "int8"] = "none",
    topology: AdditiveWay = "auto",
) -> Strategy:
    """Gradients leave layer by layer, joined by a plan, or up to `megabytes`."""
    checks.one_of("compressor", compressor, list(FEW_BITS))
    return Strategy(overlap=Fused(megabytes), compressor=FEW_BITS[compressor](), topology=way(topology))
