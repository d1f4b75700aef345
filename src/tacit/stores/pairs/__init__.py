"""Replicas that average in pairs, each by a store of its parameters: the engine of `topologies.Pairs`.

Exchanges of two ranks at any time cannot be collectives of torch.distributed, which all ranks start in one
order. Gloo's send and receive would work for two, but a rank that only answers would wait in a receive for a
message that may never come, until the group's time-out breaks the pair, and could not distinguish a dead rank
from a silent one. The parameter server's channels have all that is needed: one thread receives, any may send
and none waits, a dead end is an error at once, and both ends have proved themselves. So a pair is a
`Channel`, and a rank that answers is a small server. The mean of all ranks at the end is a collective.
"""

from tacit.stores.pairs.joining import join as join
from tacit.stores.pairs.store import ReplicaStore as ReplicaStore
from tacit.stores.pairs.transport import Membership as Membership
from tacit.stores.pairs.transport import PairTransport as PairTransport

__all__ = ["Membership", "PairTransport", "ReplicaStore", "join"]
