"""Gradient tracking over a graph (DIGing: Nedic, Olshevsky & Shi, SIAM J. Optim. 2017, arXiv 1607.03218).

With stochastic gradients: Pu & Nedic 2018, arXiv 1805.11454. On each worker i, with g_i at its own x_i:
                                                            here:
    y_i <- y_i + g_i(x_i) - g_i(x_i) of the step before     Tracking, of the optimizer's steps u = -lr g
    x_i <- sum_j W_ij (x_j - lr y_j)                        Gossip, and Mix
    y_i <- sum_j W_ij y_j                                   Gossip, in the same message

D-PSGD's replicas (`gossip`) end apart where their data differ, by the learning rate; these meet, as each
steps by an estimate of the mean step. A rank sends twice the bytes of `gossip`.

Differences from the papers: what is tracked is the optimizer's own step, so that any optimizer will do; with
plain SGD and a constant rate it is the papers', and a rate that changes is part of what is tracked. Both are
combined after they are adapted ("adapt then combine"). `session.sync()` makes replicas equal, and trackers
begin anew.
"""

from __future__ import annotations

from tacit.algorithms.gossip import mixing
from tacit.algorithms.registry import algorithm
from tacit.compressors import Tracking
from tacit.strategy import Buffers, Strategy
from tacit.topologies.gossip import Gossip, Graph


@algorithm(
    family="gossip",
    paper="DIGing: Nedic et al. 2017, arXiv 1607.03218; Pu & Nedic 2018, arXiv 1805.11454",
    compresses=False,
    changes="as gossip; each replica steps by an estimate of the mean step of all, so that replicas meet",
)
def gradient_tracking(graph: Graph = "exponential", buffers: Buffers = "on_sync") -> Strategy:
    """Mix with the neighbours, and step by an estimate of the mean step, which is mixed too."""
    return mixing(Gossip(graph), 1, 0, buffers, Tracking())
