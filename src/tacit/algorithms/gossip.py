"""Replicas that average with a few neighbours in every step, and never all at once.

D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056), on each worker i:     here:
    x_i <- sum_j W_ij x_j - lr * g_i                    the user's optimizer, then Gossip and Mix

The paper steps and mixes side by side; here a replica steps, and then mixes what has come of it:
x_i <- sum_j W_ij (x_j - lr * g_j) ("adapt then combine"), as no message begins before the step is taken.
With `late=1` the mix is applied a step later, on top of that step, which hides the message.

SGP (Assran et al., ICML 2019, arXiv 1811.10792) sends to one rank a step, 1, 2, 4, ... places further in
turn. Its push-sum weights correct for graphs in which a rank gets more than it gives. In this graph each rank
gives and gets one half, in every step, so that the weights are 1 for ever: they are not sent. In the other
graphs of `sgp`, and with any column-stochastic P as a value, they are. Its algorithm 1 on each worker i:

    x_i <- x_i - gamma * g_i(z_i)                       the user's optimizer steps from z_i, the parameters
    send (p_ji x_i, p_ji w_i) to all j, and receive     Directed, PushSum: its states `pushed`, `weight`
    x_i <- sum_j p_ij x_j;  w_i <- sum_j p_ij w_j
    z_i <- x_i / w_i                                    PushSum: the answer, which Mix applies

    Strategy(subject="delta", compressor=PushSum(), topology=Directed(P), merge=Mix())

Overlapped SGP is `late=1`: what has come is applied a step later, on top of that step. The paper's replicas
may get a message some steps late, each at its own time; here all wait for those of one round.

Gossip-PGA (Chen et al., ICML 2021, arXiv 2105.09080) averages all ranks every H rounds.

What travels is how far a replica is from where all were equal last, which mixes as the parameters do. The
optimizer's own state stays local, as in the papers.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from tacit import checks
from tacit.algorithms.registry import algorithm
from tacit.compressors import Dense, PushSum
from tacit.contracts import Compressor, Merge, Topology
from tacit.merges import Mix
from tacit.overlap import Bucketwise, Delayed
from tacit.rounds import Every
from tacit.strategy import Buffers, Strategy
from tacit.topologies import Directed
from tacit.topologies.gossip import Gossip, Graph

Pushed: TypeAlias = Literal["one-peer", "one-way", "star"]
"""The graphs of SGP: the one-peer graph of `Gossip`, and those of `Directed`."""


@algorithm(
    family="gossip",
    paper="D-PSGD: Lian et al. 2017, arXiv 1705.09056",
    compresses=False,
    changes="no gradient travels; each replica is averaged with its neighbours in a graph",
)
def gossip(
    graph: Graph = "exponential", sync_every: int = 1, late: int = 0, buffers: Buffers = "on_sync"
) -> Strategy:
    """Average with the neighbours in a graph, every `sync_every` steps."""
    return mixing(Gossip(graph), sync_every, late, buffers)


@algorithm(
    family="gossip",
    paper="SGP: Assran et al. 2019, arXiv 1811.10792",
    compresses=False,
    changes="no gradient travels; each replica is averaged with one other, another one in each step",
)
def sgp(
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
    graph: Pushed = "one-peer",
) -> Strategy:
    """Send half to one rank, 1, 2, 4, ... places further in turn; or shares along a directed graph."""
    checks.one_of("graph", graph, get_args(Pushed))
    if graph == "one-peer":
        return mixing(Gossip(graph), sync_every, late, buffers)
    return mixing(Directed(graph), sync_every, late, buffers, PushSum())


@algorithm(
    family="gossip",
    paper="Gossip-PGA: Chen et al. 2021, arXiv 2105.09080",
    compresses=False,
    changes="as gossip; every few rounds all replicas are averaged",
)
def gossip_pga(
    graph: Graph = "one-peer",
    global_every: int = 8,
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Average with the neighbours, and with all ranks in every `global_every`-th round."""
    checks.whole("global_every", global_every, 1, None, "write 8, or attach 'gossip' for never")
    return mixing(Gossip(graph, global_every), sync_every, late, buffers)


def mixing(
    topology: Topology,
    sync_every: int,
    late: int,
    buffers: Buffers = "averaged",
    compressor: Compressor | None = None,
    merge: Merge | None = None,
) -> Strategy:
    """A strategy of replicas that step alone, and take what the topology gives each; by default a mix."""
    checks.whole("late", late, 0, None, "write 1, or 0 for answers that are applied at once")
    return Strategy(
        subject="delta",
        rounds=Every(sync_every),
        compressor=compressor or Dense(),
        topology=topology,
        overlap=Delayed(late) if late else Bucketwise(),
        merge=merge or Mix(),
        buffers=buffers,
    )
