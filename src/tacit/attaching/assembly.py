"""Makes the levels of a strategy for one model."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tacit.contracts import NODE, WORLD, LinkRates, made_for
from tacit.errors import AttachError
from tacit.levels.kinds import kind_of
from tacit.levels.level import Level
from tacit.levels.spec import AttachSpec
from tacit.session.learning_rates import Rates
from tacit.strategy import AnyStrategy, Strategy
from tacit.transports.process_groups import gathered, ranks_of

if TYPE_CHECKING:
    from tacit.links import Links
    from tacit.optimizer_hooks.taken_momentum import Taken


def links_for(spec: AttachSpec) -> Links | None:
    """The links, measured now if `probe` asks for it or a topology depends on them. A collective call.

    All ranks get the same numbers, so that they decide alike.
    """
    if not (spec.probe or any(level.topology.needs_rates for level in spec.strategy.levels)):
        return None
    from tacit.levels.node_layout import measured_links

    return measured_links(spec.group, spec.mesh)


def levels_of(
    spec: AttachSpec, rates: Rates, taken: Taken | None, links: Links | None = None
) -> Iterator[Level]:
    """Make the strategy's levels, near to far. A generator: all ranks must exhaust it, as a collective call.

    Args:
        spec: the arguments of attach, equal on all ranks.
        rates: reads the parameters' learning rates.
        taken: the momentum that the strategy takes from the optimizers.
        links: as of `links_for`.

    Raises:
        AttachError: nothing says which ranks share a node, or only some ranks have a weight.
    """
    strategy, group = spec.strategy, spec.group
    nodes: Sequence[Sequence[int]] = ()
    if _goes_by_node(strategy):
        from tacit.levels.node_layout import by_places, read_nodes, warn_of_one

        nodes = read_nodes(group, spec.mesh)
        if spec.mesh is None:
            strategy, nodes = by_places(strategy, nodes, group)
        if group.rank() == 0:
            warn_of_one(strategy, nodes)
    weights = _weights(spec)
    levels: list[Level] = []
    for each in _for_links(fully_named(strategy), links):
        level = kind_of(each)(spec, each, rates, nodes, _share(weights, group.rank(), each, nodes), taken)
        levels.append(level)
        yield level
    for at_work in levels:
        if at_work.strategy.rounds.follows is not None:
            at_work.session.schedule.follow(levels[-1].session.schedule)


def _for_links(levels: Sequence[Strategy], links: Links | None) -> Sequence[Strategy]:
    """The levels, with topologies for these links."""
    if links is None:
        return levels
    latency = statistics.median(links.between(links.latency) or [0.0])
    rates = LinkRates(links.rate_both_ways, links.ranks, latency)
    return [replace(each, topology=made_for(each.topology, rates)) for each in levels]


def _goes_by_node(strategy: AnyStrategy) -> bool:
    return any({level.topology.scope, level.topology.meets} != {WORLD} for level in strategy.levels)


def fully_named(strategy: AnyStrategy) -> Sequence[Strategy]:
    """The levels; if there are several, each also has the name of the whole, for the profiler."""
    if len(strategy.levels) == 1:
        return strategy.levels
    whole = strategy.name.partition(":")[0]
    return [replace(level, name=f"{whole}.{level.name}") for level in strategy.levels]


def _weights(spec: AttachSpec) -> list[float]:
    """The weight of each rank; by default all are equal. A collective call."""
    if not spec.periodic:
        return [1.0] * spec.group.size()
    mine = torch.tensor([0.0 if spec.weight is None else spec.weight], dtype=torch.float64)
    weights = [*spec.weights] or [float(each) for each in gathered(mine, spec.group)]
    if not any(weights):
        return [1.0] * len(weights)
    ranks = ranks_of(spec.group)
    without = [rank for rank, each in zip(ranks, weights, strict=True) if not each]
    if without:
        raise AttachError(f"ranks {without} give no weight, and others do: give one on every rank")
    return weights


def _share(weights: Sequence[float], me: int, level: Strategy, nodes: Sequence[Sequence[int]]) -> float:
    """This rank's weight in a mean of this level; 1 on average over the ranks of the mean.

    If the ranks of a node average gradients, their deltas are equal, so further levels use the sum of their
    weights.
    """
    sharing: Sequence[int] = range(len(weights))
    if level.subject == "gradient" and level.topology.scope == NODE:
        sharing = next(node for node in nodes if me in node)
    return weights[me] * len(sharing) / sum(weights[rank] for rank in sharing)
