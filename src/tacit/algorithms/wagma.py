"""Replicas that average in small groups, which change from round to round.

WAGMA-SGD (Li et al., arXiv 2005.00124, IEEE TPDS 2021), on each of P ranks:      here:
    w' <- w - lr * g                                                              the user's optimizer
    every tau-th iteration: w <- mean of w' over all ranks                        Groups(global_every=tau)
    others: sum of w' over a group of S, by a butterfly whose masks go on from    Groups(drawing=
    iteration to iteration; w <- that sum / S                                     "butterfly"), Mix
    a rank that comes late: its last w stands in, w <- (sum + w') / (S + 1)       Pairs("butterfly")

Prague (Luo et al., ASPLOS 2020): partial all-reduce in random groups, which a    Groups(drawing="random"),
group generator hands out to ranks as they come                                   drawn from the seed

As they are by default, the groups of a round are known ahead and wait for their ranks, which keeps a run
deterministic. With `wagma:wait=false` a group waits for none of them, as in the paper: its ranks average two
by two, each by a store that answers at any time, and of a late rank what its store holds is taken. A late
rank's step is added to what came meanwhile, where the paper gives it a share of S + 1: no replica counts for
more than another, and the mean of all stays exact. In every `global_every`-th round all wait for all, as in
the paper. An average begins when the one of the two ranks that asks (an even number of bits is set in its own
number) has taken its step, in the paper when the first rank of the group has.

Prague's groups are drawn ahead here, and wait. Random pairs that wait for nobody: `adpsgd`. With `late=1` an
answer is applied a step later, which hides the messages.
"""

from __future__ import annotations

from tacit import checks
from tacit.algorithms.gossip import mixing
from tacit.algorithms.registry import algorithm
from tacit.errors import ConfigError
from tacit.merges import ServerParams
from tacit.strategy import Buffers, Strategy
from tacit.topologies import Groups, Pairs


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
    wait: bool = True,
    allow_lost: bool = False,
) -> Strategy:
    """Average in groups of `group_size`, which `wait` or not, and all in every `global_every`-th round.

    `allow_lost`: go on without dead ranks, where groups do not wait.
    """
    checks.whole("global_every", global_every, 1, None, "write 10, or attach 'prague' for never")
    checks.flag("wait", wait)
    checks.flag("allow_lost", allow_lost)
    if not wait:
        return _waiting_for_nobody(
            Pairs("butterfly", allow_lost, group_size, global_every), sync_every, late, buffers
        )
    if allow_lost:
        raise ConfigError(
            "allow_lost=true with groups that wait for their ranks is not possible: write wait=false too"
        )
    return mixing(Groups(group_size, "butterfly", global_every), sync_every, late, buffers)


@algorithm(
    family="gossip",
    paper="Prague: Luo et al. 2020, ASPLOS, arXiv 1909.08029",
    compresses=False,
    changes="no gradient travels; replicas are averaged in random groups, others in each round",
    instead="wagma",
)
def prague(
    group_size: int = 2,
    sync_every: int = 1,
    late: int = 0,
    buffers: Buffers = "on_sync",
) -> Strategy:
    """Average in random groups of `group_size`."""
    checks.whole("group_size", group_size, 2, None, "write 2, 4 or another power of two")
    return mixing(Groups(group_size, "random"), sync_every, late, buffers)


def _waiting_for_nobody(topology: Pairs, sync_every: int, late: int, buffers: Buffers) -> Strategy:
    if buffers != "on_sync":
        raise ConfigError(
            f"buffers={buffers!r} with wait=false is not possible, as buffers are averaged with the "
            "parameters then: leave it out"
        )
    return mixing(topology, sync_every, late, merge=ServerParams())
