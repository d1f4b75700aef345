"""tacit: data-parallel PyTorch training that is fast where the network is slow.

The names load when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.cluster import Cluster
    from tacit.compressors import (
        BF16,
        FP8,
        FP16,
        LAG,
        QSGD,
        Clip,
        Dense,
        ErrorFeedback,
        Int8,
        MajoritySign,
        MomentumCorrection,
        Natural,
        OneBit,
        Phases,
        PowerSGD,
        RandomK,
        Select,
        Sign,
        TernGrad,
        Then,
        Threshold,
        TopK,
    )
    from tacit.doors.attach import Attached, attach, from_env
    from tacit.doors.hook import CommState, comm_hook
    from tacit.doors.scalars import log_metrics
    from tacit.doors.state import join_states
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
    from tacit.merges import Adopt, Average, Elastic, Keep, OuterStep, Replace, SlowMo, StaleMean
    from tacit.optim import LAMB, LARS, GrowingBatches, scale_lr
    from tacit.overlap import Bucketwise, Delayed
    from tacit.rounds import (
        AdaComm,
        ByVariance,
        Cycling,
        Every,
        EveryEpoch,
        EveryStep,
        Inside,
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
    "tacit.doors": (
        "Attached",
        "CommState",
        "attach",
        "comm_hook",
        "from_env",
        "join_states",
        "log_metrics",
    ),
    "tacit.cluster": ("Cluster",),
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
        "Phases",
        "PowerSGD",
        "RandomK",
        "Select",
        "Sign",
        "TernGrad",
        "Then",
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
    "tacit.merges": ("Adopt", "Average", "Elastic", "Keep", "OuterStep", "Replace", "SlowMo", "StaleMean"),
    "tacit.overlap": ("Bucketwise", "Delayed"),
    "tacit.optim": ("LAMB", "LARS", "GrowingBatches", "scale_lr"),
    "tacit.rounds": (
        "AdaComm",
        "ByVariance",
        "Cycling",
        "Every",
        "EveryEpoch",
        "EveryStep",
        "Inside",
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
    "Adopt",
    "Asynchronous",
    "AttachError",
    "Attached",
    "Auto",
    "Average",
    "Bucketwise",
    "ByVariance",
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
    "Inside",
    "Int8",
    "Keep",
    "Levels",
    "MajoritySign",
    "MomentumCorrection",
    "Natural",
    "NonFinite",
    "OnPlateau",
    "OneBit",
    "OuterStep",
    "PeerLost",
    "Phases",
    "PowerSGD",
    "RandomK",
    "RatesDiffer",
    "Replace",
    "Select",
    "ServerLost",
    "Sign",
    "SlowMo",
    "StaleMean",
    "StaleSynchronous",
    "Star",
    "Strategy",
    "Synchronous",
    "TacitError",
    "TernGrad",
    "Then",
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
