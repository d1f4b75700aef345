"""AdaComp, adaptive residual gradient compression (Chen et al., AAAI 2018, arXiv 1712.02679).

The algorithm on each worker r, for each bin of L_T entries in a row:     here:
    G <- residue + dW;  H <- G + dW                                   AdaComp.choose; ErrorFeedback
    send the entries with |H_i| >= max |G| of the bin                 AdaComp.choose, L_T = `bin`
    as their sign, times one magnitude                                AdaComp.write
    residue <- G, less what was sent                                  ErrorFeedback
    x <- x - lr * mean_r                                              Flat: all-gather, then scatter-add

How many entries are sent follows the gradient; `capacity` is the room for them, all of which is sent.

Differences from the paper: that room; one `bin` for all layers, where it takes 50 for convolutions and 500
for others (`attach(..., policy=)` gives both); the magnitude is the mean of what is sent; biases and norms
are sent densely in the same message.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import AdaComp, ErrorFeedback
from tacit.strategy import Strategy
from tacit.topologies import Flat


@algorithm(
    family="sparsification",
    paper="AdaComp: Chen et al. 2018, arXiv 1712.02679",
    compresses=True,
    changes="of each bin the entries that would reach its largest in one more step, as signs",
    instead="topk",
)
def adacomp(bin: int = 500, capacity: float = 0.02) -> Strategy:
    """Of each `bin` entries those that are soon the largest, as signs; the rest stays in the residual."""
    checks.whole("bin", bin, 1, None, "write 500, or 50 for convolutions")
    return Strategy(compressor=ErrorFeedback(AdaComp(bin=bin, capacity=capacity)), topology=Flat())
