"""A small training for the planner's tests: a profile that is known, and costs that are."""

from tacit.algorithms import parse
from tacit.planning.profile import BucketCost, LevelCost, ParamReady, Profile, StepProfile, StrategyCost
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.rehearsal import rehearse

SHAPES = {"first.weight": (64, 96), "first.bias": (64,), "second.weight": (300, 64), "second.bias": (300,)}
"""Backward has the last ones first."""


def profile(buffers: int = 0, loading: float = 0.0, bucket_bytes: int = 40_000) -> Profile:
    parameters = tuple(
        ParamReady(name, shape, "float32", 0.002 * (len(SHAPES) - i))
        for i, (name, shape) in enumerate(SHAPES.items())
    )
    step = StepProfile(0.001 + loading, 0.004, 0.010, 0.002, parameters, loading)
    return Profile(step, bucket_bytes, 1, 1, 4, 0.0, 0.0, buffers, 0)


def with_cost(made: Profile, algorithm: str, nodes: int, ranks: int, each: float = 0.0) -> Profile:
    """The profile with a cost of `each` seconds a segment, and twice that for a round of deltas."""
    levels = tuple(
        LevelCost(
            tuple(BucketCost(b.numel, (each,) * (len(b.messages) + 1)) for b in script.buckets),
            2 * each if script.strategy.subject == "delta" else 0.0,
        )
        for script in rehearse(parse(algorithm), made, nodes, ranks)
    )
    return made.with_costs([StrategyCost(algorithm, nodes, ranks, levels)])


def network(nodes: int = 4, ranks: int = 1, rate: float = 1e6, **more: float) -> Network:
    """Links of `rate` bytes a second, without latency; cores enough for all."""
    known = {"latency": 0.0, "cores": 100.0, "sharing": 1, "per_byte": 0.0, "per_hop": 0.0}
    return Network(nodes, ranks, rate, **{**known, "near_latency": 0.0, **more})  # type: ignore[arg-type]
