"""Replicas that average in random pairs while they train, and never wait for a slower one.

AD-PSGD (Lian et al., ICML 2018, arXiv 1710.06952), on each worker i:         here:
    read x^_i, the model to compute with, from x_i                            the model's own parameters
    g_i <- gradient at x^_i                                                   the user's step; `OptimizerHook`
                                                                              has how far it has moved x^_i
    draw a neighbour j; x_i, x_j <- (x_i + x_j) / 2, at one moment            `Pairs`; `ReplicaStore`
    x_i <- x_i - lr * g_i                                                     `ReplicaStore.push`
    (appendix) active workers ask, passive ones answer; graph bipartite       even ranks, odd ranks

x_i is the rank's store, which a passive rank's neighbours change while it computes; x^_i is read from it
after each round. The order of a round is that of the appendix: the step is added to x_i, and what an average
brings in the meantime is added to it and not put in its place.

Differences. Parameters are averaged chunk by chunk, each chunk at one moment: parts of a model may be met by
two neighbours in turn. A rank averages after its step and waits for the message, but for no
step; with `late=1` it waits for neither, and takes the answer a step later, as the paper's second thread
does. Neighbours are drawn alike often, but in the same round different ones. Floating-point buffers
(BatchNorm's statistics) are averaged with the parameters; the optimizer's state stays local.

A checkpoint has each rank's own replica. What is under way while ranks save may be in one and not in the
other: call `session.sync()` before, and it is exact. The draws begin anew where it is loaded.
"""

from __future__ import annotations

from typing import get_args

from tacit import checks
from tacit.algorithms.gossip import mixing
from tacit.algorithms.registry import algorithm
from tacit.merges import ServerParams
from tacit.strategy import Strategy
from tacit.topologies.pairs import Pairs, RandomGraph


@algorithm(
    family="gossip",
    paper="AD-PSGD: Lian et al. 2018, arXiv 1710.06952",
    compresses=False,
    changes="no gradient travels; two replicas at a time are averaged, and nobody waits for a slower rank",
)
def adpsgd(
    graph: RandomGraph = "complete", sync_every: int = 1, late: int = 0, allow_lost: bool = False
) -> Strategy:
    """Average with one random neighbour every `sync_every` steps; `allow_lost`: go on without dead ranks."""
    checks.one_of("graph", graph, get_args(RandomGraph))  # a butterfly is `wagma:wait=false`
    return mixing(Pairs(graph, allow_lost), sync_every, late, merge=ServerParams())
