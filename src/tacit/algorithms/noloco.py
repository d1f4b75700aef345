"""NoLoCo (Kolehmainen et al. 2025, arXiv 2506.10911): DiLoCo's outer steps, by random pairs.

The outer step of the authors' code (github.com/jkolehm/noloco, sparse_optimizer_c.py, commit 37d1a8a), on
replica i with fast parameters theta and slow ones phi:            here:
    H steps of Adam from theta_i = phi_i                           the user's optimizer
    draw a permutation of the ranks; cut it into groups of n       Groups(n, "random", equal=True)
    delta_i <- theta_i - phi_i
    m_i <- mu m_i + eta mean(delta) + eta (mean(phi) - phi_i)      OuterMix(eta, mu): its state `momentum`
    phi_i <- phi_i + m_i;  theta_i <- phi_i                        OuterMix: its state `slow`; Mix applies it

The means are over the group. Together those of delta and of phi are that of theta: eta (mean(theta) - phi_i)
is added to the momentum, and theta alone is sent, where the authors' code sends delta and phi.

Of the paper the abstract was read; the update, and the defaults, are those of the code: its configurations
"c4_noloco_mean" of 100 million to 7 billion parameters have H = 50, eta = 0.7, mu = 0.5 and pairs. In its
older class, `SparseOptimizer`, replicas pull at each other inside Adam; that is not here, nor is the random
routing through pipeline stages, as a rank here has all of the model.

Differences: groups are drawn from the session's seed and the round. A group is averaged by swaps, so its size
is a power of two. `session.sync()` makes replicas equal, which the code never does; slow parameters begin
anew there, and momentum at 0. With `late` the answer is applied that many steps later, on top of these steps.
A replica alone takes its own steps only.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.gossip import mixing
from tacit.algorithms.registry import algorithm
from tacit.compressors import OuterMix
from tacit.strategy import Buffers, Strategy
from tacit.topologies import Groups


@algorithm(
    family="gossip",
    paper="NoLoCo: Kolehmainen et al. 2025, arXiv 2506.10911",
    compresses=False,
    changes="each replica takes outer steps of its own, with momentum, towards the mean of a random pair",
)
def noloco(
    sync_every: int = 50,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    group_size: int = 2,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Outer steps with momentum towards the mean of a random group, every `sync_every` steps."""
    checks.real("outer_lr", outer_lr, "write 0.7", above=0)
    checks.real("outer_momentum", outer_momentum, "write 0.5, or 0 for none", least=0, below=1)
    checks.whole("group_size", group_size, 2, None, "write 2, 4 or another power of two")
    groups, outer = Groups(group_size, "random", equal=True), OuterMix(outer_lr, outer_momentum)
    return mixing(groups, sync_every, late, buffers, outer)
