"""tacit: data-parallel PyTorch training that is fast where the network is slow.

The names load when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.compressors import (
        BF16,
        FP8,
        FP16,
        LAG,
        QSGD,
        Cascade,
        Clip,
        Dense,
        ErrorFeedback,
        Int8,
        MajoritySign,
        MomentumCorrection,
        Natural,
        OneBit,
        Partition,
        PowerSGD,
        RandomK,
        Scheduled,
        Sign,
        TernGrad,
        Threshold,
        TopK,
    )
    from tacit.errors import (
        AttachError,
        CheckpointError,
        ConfigError,
        NonFinite,
        PeerLost,
        RatesDiffer,
        ServerLost,
        TacitError,
        UnevenData,
    )
    from tacit.hooks.attach import Attached, attach, from_env
    from tacit.hooks.checkpoint import join_states
    from tacit.hooks.comm_hook import CommState, comm_hook
    from tacit.hooks.scalars import log_metrics
    from tacit.lab.cluster import Cluster
    from tacit.merges import (
        Average,
        Elastic,
        LocalResidual,
        OuterStep,
        Replace,
        ServerParams,
        SlowMo,
        StaleMean,
    )
    from tacit.optim import LAMB, LARS, GrowingBatches, scale_lr
    from tacit.overlap import Bucketwise, Delayed
    from tacit.rounds import (
        AdaComm,
        ByVariance,
        Cycling,
        Every,
        EveryEpoch,
        EveryStep,
        NodeRounds,
        OnPlateau,
        Until,
    )
    from tacit.strategy import Levels, Strategy
    from tacit.topologies import (
        Asynchronous,
        Auto,
        Flat,
        GlobalTopK,
        Hierarchical,
        StaleSynchronous,
        Star,
        Synchronous,
        TwoPhase,
    )

_HOMES = {
    "tacit.hooks": (
        "Attached",
        "CommState",
        "attach",
        "comm_hook",
        "from_env",
        "join_states",
        "log_metrics",
    ),
    "tacit.lab.cluster": ("Cluster",),
    "tacit.compressors": (
        "BF16",
        "FP8",
        "FP16",
        "LAG",
        "QSGD",
        "Clip",
        "Dense",
        "ErrorFeedback",
        "Int8",
        "MajoritySign",
        "Natural",
        "OneBit",
        "MomentumCorrection",
        "Scheduled",
        "PowerSGD",
        "RandomK",
        "Partition",
        "Sign",
        "TernGrad",
        "Cascade",
        "Threshold",
        "TopK",
    ),
    "tacit.errors": (
        "AttachError",
        "CheckpointError",
        "ConfigError",
        "NonFinite",
        "PeerLost",
        "RatesDiffer",
        "ServerLost",
        "TacitError",
        "UnevenData",
    ),
    "tacit.merges": (
        "ServerParams",
        "Average",
        "Elastic",
        "LocalResidual",
        "OuterStep",
        "Replace",
        "SlowMo",
        "StaleMean",
    ),
    "tacit.overlap": ("Bucketwise", "Delayed"),
    "tacit.optim": ("LAMB", "LARS", "GrowingBatches", "scale_lr"),
    "tacit.rounds": (
        "AdaComm",
        "ByVariance",
        "Cycling",
        "Every",
        "EveryEpoch",
        "EveryStep",
        "NodeRounds",
        "OnPlateau",
        "Until",
    ),
    "tacit.strategy": ("Levels", "Strategy"),
    "tacit.topologies": (
        "Asynchronous",
        "Auto",
        "Flat",
        "GlobalTopK",
        "Hierarchical",
        "StaleSynchronous",
        "Star",
        "Synchronous",
        "TwoPhase",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "LAG",
    "LAMB",
    "LARS",
    "QSGD",
    "AdaComm",
    "Asynchronous",
    "AttachError",
    "Attached",
    "Auto",
    "Average",
    "Bucketwise",
    "ByVariance",
    "Cascade",
    "CheckpointError",
    "Clip",
    "Cluster",
    "CommState",
    "ConfigError",
    "Cycling",
    "Delayed",
    "Dense",
    "Elastic",
    "ErrorFeedback",
    "Every",
    "EveryEpoch",
    "EveryStep",
    "Flat",
    "GlobalTopK",
    "GrowingBatches",
    "Hierarchical",
    "Int8",
    "Levels",
    "LocalResidual",
    "MajoritySign",
    "MomentumCorrection",
    "Natural",
    "NodeRounds",
    "NonFinite",
    "OnPlateau",
    "OneBit",
    "OuterStep",
    "Partition",
    "PeerLost",
    "PowerSGD",
    "RandomK",
    "RatesDiffer",
    "Replace",
    "Scheduled",
    "ServerLost",
    "ServerParams",
    "Sign",
    "SlowMo",
    "StaleMean",
    "StaleSynchronous",
    "Star",
    "Strategy",
    "Synchronous",
    "TacitError",
    "TernGrad",
    "Threshold",
    "TopK",
    "TwoPhase",
    "UnevenData",
    "Until",
    "attach",
    "comm_hook",
    "from_env",
    "join_states",
    "log_metrics",
    "scale_lr",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("tacit")
    if name not in _HOME:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
