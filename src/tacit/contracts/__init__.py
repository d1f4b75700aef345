"""The interfaces of a strategy's five parts, and the types that they share.

`Rounds`: when replicas exchange. `Compressor`: what they send. `Topology`: with which ranks, by which
collectives. `Overlap`: how communication is hidden. `Merge`: how the answer is applied. Compressors and
topologies do no I/O: they are generators that yield requests and are sent the answers. So one strategy runs
on every transport.
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
from tacit.contracts.compressor import (
    Compressor,
    Matrix,
    MixingCompressor,
    Momentum,
    OneShot,
    OneShotUse,
    OverflowShown,
    PartitionedCompressor,
    PayloadSpec,
    ServerAnswer,
    SparseEntries,
    VariableLength,
    WeighedCompressor,
)
from tacit.contracts.context import AxisRank, Context, Exchange, Outcome, Workspace
from tacit.contracts.merge import (
    AnchorMerge,
    Application,
    ConsolidatingMerge,
    LearningRateMerge,
    Merge,
    MixingMerge,
    UnsentMerge,
    add_mean_,
    consolidate_,
)
from tacit.contracts.overlap import LateOverlap, LayerwiseOverlap, Overlap
from tacit.contracts.rounds import (
    AdaptiveRounds,
    FollowingRounds,
    PeriodicRounds,
    PhasedRounds,
    Rounds,
    Sync,
)
from tacit.contracts.topology import (
    MixingTopology,
    NodeTopology,
    Options,
    ServerOption,
    ServerTopology,
    Topology,
)
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
    "AnchorMerge",
    "Application",
    "AxisRank",
    "Collective",
    "Compressor",
    "ConsolidatingMerge",
    "Context",
    "Decoded",
    "Difference",
    "Exact",
    "Exchange",
    "Factors",
    "FollowingRounds",
    "Grouped",
    "LateOverlap",
    "LayerwiseOverlap",
    "LearningRateMerge",
    "Matrix",
    "Merge",
    "MixingCompressor",
    "MixingMerge",
    "MixingTopology",
    "Momentum",
    "NodeTopology",
    "OneShot",
    "OneShotUse",
    "Options",
    "Outcome",
    "OverflowShown",
    "Overlap",
    "PartitionedCompressor",
    "Payload",
    "PayloadSpec",
    "PeriodicRounds",
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
    "ServerAnswer",
    "ServerOption",
    "ServerTopology",
    "Spans",
    "Sparse",
    "SparseEntries",
    "State",
    "Sync",
    "Topology",
    "Transmitted",
    "Transport",
    "UnsentMerge",
    "VariableLength",
    "WeighedCompressor",
    "Workspace",
    "add_mean_",
    "add_rescaled",
    "consolidate_",
    "cut_factors",
    "lasting",
    "state_dtype",
]

if not TYPE_CHECKING:  # type checkers must not see the old names
    __getattr__ = _moved.attributes(__name__)
