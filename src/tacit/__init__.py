"""tacit: data-parallel PyTorch training that is fast where the network is slow.

The names load when they are first used (PEP 562), so that importing the package costs nothing. The answers to
the five questions are in submodules: `tacit.compressors.TopK`, `tacit.rounds.Every`, `tacit.topologies.Flat`,
`tacit.merges.Average`; the named strategies are functions: `tacit.algorithms.dgc(ratio=0.01)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit import _moved

if TYPE_CHECKING:
    from tacit import algorithms as algorithms
    from tacit import compressors as compressors
    from tacit import contracts as contracts
    from tacit import errors as errors
    from tacit import links as links
    from tacit import merges as merges
    from tacit import optim as optim
    from tacit import overlap as overlap
    from tacit import prediction as prediction
    from tacit import rounds as rounds
    from tacit import testing as testing
    from tacit import topologies as topologies
    from tacit.algorithms import parse
    from tacit.api.attach import attach, from_env
    from tacit.api.attached import Attached, measure_consensus
    from tacit.api.comm_hook import CommState, comm_hook
    from tacit.checkpoint.session_state import join_states
    from tacit.errors import (
        AttachError,
        CheckpointError,
        ConfigError,
        DecisionError,
        NonFinite,
        Overflow,
        PayloadError,
        PeerLost,
        ProbeError,
        RatesDiffer,
        RoundError,
        ServerLost,
        TacitError,
        TestbedError,
        UnevenData,
    )
    from tacit.fsdp.quantized import QuantizedShards, quantize_shards
    from tacit.members.roster import Members
    from tacit.members.sampler import MemberSampler
    from tacit.reporting.scalars import log_metrics
    from tacit.reporting.trials import report, trial
    from tacit.strategy import Levels, Strategy

SUBMODULES = (
    "algorithms",
    "compressors",
    "contracts",
    "errors",
    "links",
    "merges",
    "optim",
    "overlap",
    "prediction",
    "rounds",
    "testing",
    "topologies",
)
"""What is public below tacit, and loads when it is first used."""

__version__ = "0.1.0"
DISTRIBUTION = "torch-tacit"
"""What is installed to have this package: `tacit` on PyPI is another project, which could overwrite it."""

__all__ = [
    "AttachError",
    "Attached",
    "CheckpointError",
    "CommState",
    "ConfigError",
    "DecisionError",
    "Levels",
    "MemberSampler",
    "Members",
    "NonFinite",
    "Overflow",
    "PayloadError",
    "PeerLost",
    "ProbeError",
    "QuantizedShards",
    "RatesDiffer",
    "RoundError",
    "ServerLost",
    "Strategy",
    "TacitError",
    "TestbedError",
    "UnevenData",
    "attach",
    "comm_hook",
    "from_env",
    "join_states",
    "log_metrics",
    "measure_consensus",
    "parse",
    "quantize_shards",
    "report",
    "trial",
]

_HOMES = {
    "tacit.algorithms": "parse",
    "tacit.errors": "AttachError CheckpointError ConfigError DecisionError NonFinite Overflow PayloadError "
    "PeerLost ProbeError RatesDiffer RoundError ServerLost TacitError TestbedError UnevenData",
    "tacit.api.attach": "attach from_env",
    "tacit.api.attached": "Attached measure_consensus",
    "tacit.api.comm_hook": "CommState comm_hook",
    "tacit.checkpoint.session_state": "join_states",
    "tacit.fsdp.quantized": "QuantizedShards quantize_shards",
    "tacit.members.roster": "Members",
    "tacit.members.sampler": "MemberSampler",
    "tacit.reporting.scalars": "log_metrics",
    "tacit.reporting.trials": "report trial",
    "tacit.strategy": "Levels Strategy",
    # The answers' names stand here too, unseen, so that scripts that write `tacit.TopK` go on to work.
    "tacit.compressors": "AdaComp AdamMomentum BF16 Blockwise ByteCoded Cascade Clip CountSketch DCT Dense "
    "DifferenceCopy Dion EF21 EntropyCoded ErrorFeedback FP16 FP8 InParts Int8 LAG LAQ "
    "LargestChunks MajoritySign MeanFeedback MomentumCorrection Natural "
    "NaturalDithering OkTopK OneBit OuterMix Partition PowerSGD PublicCopy PushSum "
    "QSGD QuantizedPowerSGD RandomK SampledEntries SampledSpectrum Scheduled Sign "
    "SignOfMean Squeezed TernGrad ThreeLC Threshold TopK Tracking TwoMagnitudes",
    "tacit.merges": "Average CommonPoint EagerStep Elastic LocalResidual Mix OuterStep Replace ServerParams "
    "SlowMo StaleMean",
    "tacit.optim": "AdaScale LAMB LARS GrowingBatches scale_lr",
    "tacit.overlap": "Bucketwise Delayed Fused Prioritized",
    "tacit.rounds": "AdaComm ByLearningRate ByVariance Cycling During Every EveryEpoch EveryStep "
    "MomentPeriods NodeRounds OnPlateau Renewals Until",
    "tacit.topologies": "Asynchronous Auto BlueConnect Decoupled DelayedNesterov Direct Directed DoubleTree "
    "Flat GlobalTopK Gossip Groups HalvingDoubling Hierarchical LinkTree Pairs Ring StaleSynchronous "
    "Star Synchronous Torus TwoPhase Uneven",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
_missing = _moved.attributes("tacit")
_moved.install()


def __getattr__(name: str) -> Any:
    if name in SUBMODULES:
        return import_module(f"tacit.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    return _missing(name)


def __dir__() -> list[str]:
    return [*__all__, *SUBMODULES, "__version__"]
