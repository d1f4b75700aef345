"""The kind of level that a strategy needs; the modules of other kinds are not imported."""

from __future__ import annotations

from tacit.levels.level import Level
from tacit.strategy import Strategy


def kind_of(strategy: Strategy) -> type[Level]:
    """The class of level for a strategy."""
    if strategy.subject == "nothing":
        from tacit.levels.untouched import UntouchedLevel

        return UntouchedLevel
    if strategy.topology.in_pairs:
        from tacit.levels.pairs import PairLevel

        return PairLevel
    if strategy.server is not None and strategy.server.optimizer == "server":
        from tacit.levels.server_steps import SteppedLevel

        return SteppedLevel
    if strategy.independent:
        from tacit.levels.workers import WorkerLevel

        return WorkerLevel
    if strategy.subject == "delta":
        from tacit.levels.replicas import ReplicaLevel

        return ReplicaLevel
    if strategy.overlap.layerwise:
        from tacit.levels.layerwise import LayerwiseLevel

        return LayerwiseLevel
    from tacit.levels.gradients import GradientLevel

    return GradientLevel
