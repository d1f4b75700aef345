"""Which kind of level a strategy needs; of the others, nothing is imported."""

from __future__ import annotations

from tacit.levels.level import Level
from tacit.strategy import Strategy


def kind_of(strategy: Strategy) -> type[Level]:
    """The kind of level that puts a strategy to work."""
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
