"""With which ranks replicas exchange, and by which collectives."""

from typing import TYPE_CHECKING

from tacit.exports import on_first_use

if TYPE_CHECKING:
    from tacit.topologies.auto import Auto
    from tacit.topologies.decoupled import Decoupled
    from tacit.topologies.directed import Directed
    from tacit.topologies.flat import Flat
    from tacit.topologies.gossip import Gossip
    from tacit.topologies.groups import Groups
    from tacit.topologies.hierarchical import Hierarchical
    from tacit.topologies.pairs import Pairs
    from tacit.topologies.shapes import (
        BlueConnect,
        Direct,
        DoubleTree,
        HalvingDoubling,
        LinkTree,
        Ring,
        Torus,
    )
    from tacit.topologies.star import Asynchronous, DelayedNesterov, StaleSynchronous, Star, Synchronous
    from tacit.topologies.tree import GlobalTopK
    from tacit.topologies.two_phase import TwoPhase
    from tacit.topologies.uneven import Uneven
else:
    __getattr__ = on_first_use(__name__)

__all__ = [
    "Asynchronous",
    "Auto",
    "BlueConnect",
    "Decoupled",
    "DelayedNesterov",
    "Direct",
    "Directed",
    "DoubleTree",
    "Flat",
    "GlobalTopK",
    "Gossip",
    "Groups",
    "HalvingDoubling",
    "Hierarchical",
    "LinkTree",
    "Pairs",
    "Ring",
    "StaleSynchronous",
    "Star",
    "Synchronous",
    "Torus",
    "TwoPhase",
    "Uneven",
]
