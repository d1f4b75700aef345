"""Predictions of a strategy on a cluster, without measuring it there."""

from __future__ import annotations

from dataclasses import dataclass

from tacit.contracts import NET, NODE
from tacit.errors import ConfigError
from tacit.planning.profile import Profile
from tacit.planning.simulation import networks
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.costs import CostLacking, CostOf, cost_on
from tacit.planning.simulation.rehearsal import rehearse
from tacit.planning.simulation.steps import simulate
from tacit.planning.simulation.timeline import ENCODING, MAIN, SimulatedSpan
from tacit.rounds import MomentPeriods
from tacit.strategy import AnyStrategy

BASE = "ddp"
"""What all others are compared with."""


@dataclass(frozen=True)
class Prediction:
    """A step of a training with one strategy, on average over its rounds; seconds and bytes of one rank.

    Attributes:
        algorithm: the strategy's text form.
        seconds: of a step.
        compute: of these, the main thread's computing, with other ranks on the same cores.
        loading: waiting for the training's data.
        far: waiting for a link between nodes.
        near: waiting for a link inside a node.
        encoding: waiting for encoding or decoding.
        bytes_out: the bytes that leave a node in a step.
        memory: bytes of a rank: parameters, gradients, optimizer, and the strategy's state.
        spans: the timeline of a few steps.
        notes: the assumptions.
    """

    algorithm: str
    seconds: float
    compute: float
    loading: float
    far: float
    near: float
    encoding: float
    bytes_out: float
    memory: int
    spans: tuple[SimulatedSpan, ...] = ()
    notes: tuple[str, ...] = ()


def predict(strategy: AnyStrategy, profile: Profile, network: Network) -> Prediction:
    """Predict a step of a strategy, whose cost the profile has.

    Raises:
        ConfigError: the strategy does not fit; the profile does not have its cost; or it cannot be predicted,
            as what it sends depends on the training or on servers.
    """
    refuse(strategy)
    here = network.nodes, network.ranks
    try:
        cost = cost_on(profile, strategy.name, *here)
    except CostLacking:
        if profile.gpu is None:  # what does not fit the model has no cost: it says so itself
            rehearse(strategy, profile, *here)
        raise
    scripts = rehearse(networks.strategy_on(network, strategy), profile, *here)
    costs = [CostOf(level, script) for level, script in zip(cost.levels, scripts, strict=True)]
    found = simulate(costs, profile, network)
    waits = {axis: found.exposed[axis] / found.steps for axis in (NET, NODE, ENCODING)}
    seconds = found.seconds / found.steps
    trained = 2 * profile.model_bytes + profile.state_bytes
    return Prediction(
        algorithm=strategy.name,
        seconds=seconds,
        compute=seconds - sum(waits.values()) - profile.step.loading,
        loading=profile.step.loading,
        far=waits[NET],
        near=waits[NODE],
        encoding=waits[ENCODING],
        bytes_out=found.crossing / found.steps,
        memory=trained + sum(level.kept_bytes for level in cost.levels),
        spans=tuple(span for span in found.spans if span.row == MAIN or span.row in (NET, NODE, ENCODING)),
        notes=_notes(strategy),
    )


def computing(profile: Profile, network: Network) -> float:
    """The seconds of a step if communication cost nothing."""
    step = profile.step
    if profile.gpu is not None:
        return max(step.seconds, step.data + profile.gpu.launching.seconds)
    busy = max(1.0, profile.threads * network.sharing / network.cores)
    return (step.seconds - step.loading) * busy + step.loading


def refuse(strategy: AnyStrategy) -> None:
    """Refuse a strategy that cannot be predicted.

    Raises:
        ConfigError: what it sends depends on the training or on servers; the message says what to do instead.
    """
    for level in strategy.levels:
        if level.topology.in_pairs:
            raise ConfigError(
                f"{strategy.name!r} cannot be predicted: who averages with whom, and when, is left to "
                f"chance. "
                "Try it with tacit compare"
            )
        if level.server is not None:
            raise ConfigError(
                f"{strategy.name!r} cannot be predicted: what a parameter server does is not in a profile. "
                "Try it with tacit compare --servers 1"
            )
        if isinstance(level.momentum, MomentPeriods) or level.momentum == "averaged":
            raise ConfigError(
                f"{strategy.name!r} cannot be predicted: the optimizer's state, which travels with the "
                "parameters, is not in a profile. Try it with tacit compare"
            )
        if level.overlap.layerwise:
            raise ConfigError(
                f"{strategy.name!r} cannot be predicted: its messages are planned from the first steps of a "
                f"training. Try it with tacit compare"
            )
        one_shot = level.compressor.one_shot(0)
        if level.compressor.varies or (one_shot is not None and one_shot.codec.varies):
            raise ConfigError(
                f"{strategy.name!r} cannot be predicted: what it sends depends on the gradients. Try it "
                "with tacit compare"
            )


def _notes(strategy: AnyStrategy) -> tuple[str, ...]:
    if any(level.rounds.observed_metrics for level in strategy.levels):
        return ("its period changes while it trains; this is the first one",)
    if any(level.renewals is not None for level in strategy.levels):
        return ("after its first steps; without those in which gradients travel again",)
    return ()
