"""With which ranks replicas exchange, and by which collectives."""

from tacit.topologies.auto import Auto
from tacit.topologies.directed import Directed
from tacit.topologies.flat import Flat
from tacit.topologies.gossip import Gossip
from tacit.topologies.hierarchical import Hierarchical
from tacit.topologies.star import Asynchronous, StaleSynchronous, Star, Synchronous
from tacit.topologies.tree import GlobalTopK
from tacit.topologies.two_phase import TwoPhase

__all__ = [
    "Asynchronous",
    "Auto",
    "Directed",
    "Flat",
    "GlobalTopK",
    "Gossip",
    "Hierarchical",
    "StaleSynchronous",
    "Star",
    "Synchronous",
    "TwoPhase",
]
