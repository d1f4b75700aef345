"""Replicas that average in pairs, each from a store of its own: the engine of `topologies.Pairs`.

Why this one. Exchanges of two ranks at times of their own cannot be collectives of torch.distributed, which
all ranks start in one order. Gloo's send and receive would do for two, but who only answers would have to
wait in a receive for a message that may never come, until the group's time-out breaks the pair, and could not
tell a rank that is dead from one that has nothing to say. The parameter server's channels have all that is
needed: one thread receives, any may send and none waits, a dead end is an error at once, and both ends have
proved themselves. So a pair is a `Channel`, and a rank that answers is a small server. What collectives are
good for, the mean of all at the end, is one.
"""

from tacit.stores.pairs.joining import join as join
from tacit.stores.pairs.store import ReplicaStore as ReplicaStore
from tacit.stores.pairs.transport import Membership as Membership
from tacit.stores.pairs.transport import PairTransport as PairTransport

__all__ = ["Membership", "PairTransport", "ReplicaStore", "join"]
