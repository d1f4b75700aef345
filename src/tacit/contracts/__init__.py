"""The interfaces of a strategy's five parts, and the types that they share.

`Rounds`: when replicas exchange. `Compressor`: what they send. `Topology`: with which ranks, by which
collectives. `Overlap`: how communication is hidden. `Merge`: how the answer is applied. Compressors and
topologies do no I/O: they are generators that yield requests and are sent the answers. So one strategy runs
on every transport.
"""

from tacit.contracts.collectives import AllGather, AllGatherInto, AllReduce, AllToAll, Permute, ReduceScatter
from tacit.contracts.common import (
    NET,
    NODE,
    SERVER,
    WORLD,
    Factors,
    Matrix,
    Momentum,
    Payload,
    ScheduleState,
    Spans,
    State,
    cut_factors,
    state_dtype,
)
from tacit.contracts.compressor import (
    Collective,
    Compressor,
    Exchange,
    Grouped,
    OneShot,
    OneShotUse,
    Outcome,
    PayloadSpec,
    PushPull,
    ReduceEncoded,
    Request,
    formed,
    on_meta,
    payload_like,
    stage_of,
    staged_on,
)
from tacit.contracts.context import AxisRank, Context, NoMemory, Workspace
from tacit.contracts.merge import Application, Merge, add_mean_
from tacit.contracts.overlap import Overlap
from tacit.contracts.rounds import AdaptiveRounds, Rounds, Sync
from tacit.contracts.special import (
    AddingCodec,
    Decoded,
    MixingCompressor,
)
from tacit.contracts.topology import (
    ByLinks,
    LinkRates,
    MixingTopology,
    NodeTopology,
    Options,
    PairTopology,
    ServerTopology,
    Topology,
    made_for,
)
from tacit.contracts.transmitted import Difference, Exact, Rounded, Sparse, Transmitted, add_rescaled
from tacit.contracts.transport import Posted, Transport

__all__ = [
    "NET",
    "NODE",
    "SERVER",
    "WORLD",
    "AdaptiveRounds",
    "AddingCodec",
    "AllGather",
    "AllGatherInto",
    "AllReduce",
    "AllToAll",
    "Application",
    "AxisRank",
    "ByLinks",
    "Collective",
    "Compressor",
    "Context",
    "Decoded",
    "Difference",
    "Exact",
    "Exchange",
    "Factors",
    "Grouped",
    "LinkRates",
    "Matrix",
    "Merge",
    "MixingCompressor",
    "MixingTopology",
    "Momentum",
    "NoMemory",
    "NodeTopology",
    "OneShot",
    "OneShotUse",
    "Options",
    "Outcome",
    "Overlap",
    "PairTopology",
    "Payload",
    "PayloadSpec",
    "Permute",
    "Posted",
    "PushPull",
    "ReduceEncoded",
    "ReduceScatter",
    "Request",
    "Rounded",
    "Rounds",
    "ScheduleState",
    "ServerTopology",
    "Spans",
    "Sparse",
    "State",
    "Sync",
    "Topology",
    "Transmitted",
    "Transport",
    "Workspace",
    "add_mean_",
    "add_rescaled",
    "cut_factors",
    "formed",
    "made_for",
    "on_meta",
    "payload_like",
    "stage_of",
    "staged_on",
    "state_dtype",
]
