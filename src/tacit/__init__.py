"""tacit: data-parallel PyTorch training that is fast where the network is slow.

The names load when they are first used (PEP 562), so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tacit.cluster import Cluster
    from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, RandomK, Select, Sign, TopK
    from tacit.doors import Attached, attach, from_env
    from tacit.errors import AttachError, CheckpointError, ConfigError, NonFinite, PeerLost, TacitError
    from tacit.merges import Average, Replace
    from tacit.rounds import Every, EveryStep
    from tacit.strategy import Strategy
    from tacit.topologies import Flat

_HOMES = {
    "tacit.doors": ("Attached", "attach", "from_env"),
    "tacit.cluster": ("Cluster",),
    "tacit.compressors": (
        "BF16",
        "Dense",
        "ErrorFeedback",
        "PowerSGD",
        "RandomK",
        "Select",
        "Sign",
        "TopK",
    ),
    "tacit.errors": ("AttachError", "CheckpointError", "ConfigError", "NonFinite", "PeerLost", "TacitError"),
    "tacit.merges": ("Average", "Replace"),
    "tacit.rounds": ("Every", "EveryStep"),
    "tacit.strategy": ("Strategy",),
    "tacit.topologies": ("Flat",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BF16",
    "AttachError",
    "Attached",
    "Average",
    "CheckpointError",
    "Cluster",
    "ConfigError",
    "Dense",
    "ErrorFeedback",
    "Every",
    "EveryStep",
    "Flat",
    "NonFinite",
    "PeerLost",
    "PowerSGD",
    "RandomK",
    "Replace",
    "Select",
    "Sign",
    "Strategy",
    "TacitError",
    "TopK",
    "attach",
    "from_env",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("tacit")
    if name not in _HOME:
        raise AttributeError(f"module 'tacit' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
