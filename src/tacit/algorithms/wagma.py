"""Replicas that average in small groups, which change from round to round.

WAGMA-SGD (Li et al., arXiv 2005.00124, IEEE TPDS 2021), on each of P ranks:      here:
    w' <- w - lr * g                                                              the user's optimizer
    every tau-th iteration: w <- mean of w' over all ranks                        Groups(global_every=tau)
    others: sum of w' over a group of S, by a butterfly whose masks go on from    Groups(drawing=
    iteration to iteration; w <- that sum / S                                     "butterfly"), Mix
    a rank that comes late: its last w stands in, w <- (sum + w') / (S + 1)       not here

Prague (Luo et al., ASPLOS 2020): partial all-reduce in random groups, which a    Groups(drawing="random"),
group generator hands out to ranks as they come                                   drawn from the seed

What is not here is what both papers are named for: in theirs a slow rank is not waited for. Here the groups
of a round are known ahead and wait for their ranks, which keeps a run deterministic and the mean of all
replicas exact; see `Groups`. With `late=1` the answer is applied a step later, which hides the messages.
Replicas that wait for nobody: `adpsgd`.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.gossip import mixing
from tacit.algorithms.registry import algorithm
from tacit.strategy import Buffers, Strategy
from tacit.topologies.groups import Groups


@algorithm(
    family="gossip",
    paper="WAGMA-SGD: Li et al. 2020, arXiv 2005.00124",
    compresses=False,
    changes="no gradient travels; replicas are averaged in groups of a butterfly, and at times all of them",
)
def wagma(
    group_size: int | None = None,
    global_every: int = 10,
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Average in groups of `group_size`, and all ranks in every `global_every`-th round."""
    checks.whole("global_every", global_every, 1, None, "write 10, or attach 'prague' for never")
    return mixing("wagma", Groups(group_size, "butterfly", global_every), sync_every, late, buffers)


@algorithm(
    family="gossip",
    paper="Prague: Luo et al. 2020, ASPLOS, arXiv 1909.08029",
    compresses=False,
    changes="no gradient travels; replicas are averaged in random groups, others in each round",
)
def prague(
    group_size: int = 2,
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Average in random groups of `group_size`."""
    checks.whole("group_size", group_size, 2, None, "write 2, 4 or another power of two")
    return mixing("prague", Groups(group_size, "random"), sync_every, late, buffers)
