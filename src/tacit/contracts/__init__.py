"""The five questions of a communication strategy, and what their answers say to each other.

*When* do replicas exchange (`Rounds`), *what* do they send (`Compressor`), *with whom* and by which
collectives (`Topology`), *how is it hidden* (`Overlap`), *how is the answer applied* (`Merge`). Compressors
and topologies do no I/O: they are generators that yield requests and are sent the answers. So one strategy
runs on every transport.
"""

from typing import TYPE_CHECKING

from tacit import _moved
from tacit.contracts.collectives import (
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    Collective,
    Grouped,
    Permute,
    PushPull,
    ReduceEncoded,
    ReduceScatter,
    Request,
)
from tacit.contracts.common import (
    NET,
    NODE,
    SERVER,
    WORLD,
    Factors,
    Payload,
    ScheduleState,
    Spans,
    State,
    cut_factors,
    state_dtype,
)
from tacit.contracts.compressor import Compressor, Matrix, Momentum, OneShot, OneShotUse, PayloadSpec
from tacit.contracts.context import AxisRank, Context, Exchange, Outcome, Workspace
from tacit.contracts.merge import Application, Merge
from tacit.contracts.overlap import Overlap
from tacit.contracts.rounds import (
    AdaptiveRounds,
    DeferredRounds,
    FollowingRounds,
    PhasedRounds,
    Rounds,
    Sync,
)
from tacit.contracts.topology import Options, Topology
from tacit.contracts.transmitted import (
    Decoded,
    Difference,
    Exact,
    Rounded,
    Sparse,
    Transmitted,
    add_rescaled,
    lasting,
)
from tacit.contracts.transport import Posted, Transport

__all__ = [
    "NET",
    "NODE",
    "SERVER",
    "WORLD",
    "AdaptiveRounds",
    "AllGather",
    "AllGatherInto",
    "AllReduce",
    "AllToAll",
    "Application",
    "AxisRank",
    "Collective",
    "Compressor",
    "Context",
    "Decoded",
    "DeferredRounds",
    "Difference",
    "Exact",
    "Exchange",
    "Factors",
    "FollowingRounds",
    "Grouped",
    "Matrix",
    "Merge",
    "Momentum",
    "OneShot",
    "OneShotUse",
    "Options",
    "Outcome",
    "Overlap",
    "Payload",
    "PayloadSpec",
    "Permute",
    "PhasedRounds",
    "Posted",
    "PushPull",
    "ReduceEncoded",
    "ReduceScatter",
    "Request",
    "Rounded",
    "Rounds",
    "ScheduleState",
    "Spans",
    "Sparse",
    "State",
    "Sync",
    "Topology",
    "Transmitted",
    "Transport",
    "Workspace",
    "add_rescaled",
    "cut_factors",
    "lasting",
    "state_dtype",
]

if not TYPE_CHECKING:  # a type checker is to know the names that there are, and no others
    __getattr__ = _moved.attributes(__name__)
