"""DCD-PSGD (Tang, Gan, Zhang, Zhang & Liu, NeurIPS 2018, arXiv 1803.06443): gossip of compressed differences.

The paper's algorithm 1 on each worker i:                          here:
    x_i^(t+1/2) <- sum_j W_ij x_j^t - gamma * g_i(x_i^t)           DifferenceCopy: the sum that it keeps, and
                                                                   the step of the user's optimizer
    z_i <- x_i^(t+1/2) - x_i^t                                     DifferenceCopy: what is sent
    x_i^(t+1) <- x_i^t + C(z_i), and so for each neighbour j       DifferenceCopy: its state; Mix applies it

It mixes at the same time as the step, as in the paper, and not after it as `gossip` does: a replica's own
step is in its message. With `late` it would not be the paper's, and there is none.

C must be right in the mean, and its error below the paper's bound, which depends on the graph: it is QSGD.
With 4 and 8 bits the quadratic of the tests converges as it does densely; with 2 bits it diverged.

Differences from the paper: biases and norms take part in the mix densely, after the step, where QSGD exempts
them. The neighbours' copies are one sum.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.choco import Fixed, check_fixed
from tacit.algorithms.gossip import mixing
from tacit.algorithms.options.codecs import levels_of
from tacit.algorithms.registry import algorithm
from tacit.compressors import DifferenceCopy
from tacit.strategy import Buffers, Strategy
from tacit.topologies import Gossip


@algorithm(
    family="gossip",
    paper="DCD-PSGD: Tang et al. 2018, arXiv 1803.06443",
    compresses=True,
    changes="as gossip; how a replica moves travels in 8 bits, and replicas are what their neighbours know",
    instead="choco",
)
def dcd(bits: int = 8, graph: Fixed = "ring", sync_every: int = 1, buffers: Buffers = "on_sync") -> Strategy:
    """Send how a replica moves in `bits` an entry."""
    check_fixed(graph)
    checks.whole("bits", bits, 3, 8, "write 8; with 2, DCD diverges, and choco:codec=sign does not")
    return mixing(Gossip(graph), sync_every, 0, buffers, DifferenceCopy(levels_of(bits)))
