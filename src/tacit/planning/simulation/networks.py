"""The links and processors of a cluster for the clock: as measured, or as one describes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from tacit.contracts import LinkRates, made_for
from tacit.links import Links
from tacit.planning.profile import Profile
from tacit.planning.simulation.clock import Network
from tacit.strategy import AnyStrategy, AutoStrategy, Strategy

__all__ = ["FRAMES", "described", "measured", "of_ring", "strategy_on"]

FRAMES = 1448 / 1514
"""The share of a link's bytes that is payload: TCP with time stamps, in Ethernet frames of 1,500 bytes."""
_LATENCY = 7e-5
"""Seconds of a small message between two machines, without what the link itself adds."""


def measured(links: Links, profile: Profile) -> Network:
    """The very cluster on which links and profile were measured.

    A ring is as fast as its slowest neighbours are both ways at once.
    """
    nodes = len(links.ranks)
    neighbours = [(i, (i + 1) % nodes) for i in range(nodes)]
    rates = [links.rate_both_ways[i][j] for i, j in neighbours if i != j]
    near = [links.rate_both_ways[i][i] for i in range(nodes)]
    inside = [links.latency[i][i] for i in range(nodes)]
    return Network(
        nodes=nodes,
        ranks=len(links.ranks[0]),
        rate=min((rate for rate in rates if rate is not None), default=math.inf) / 8,
        latency=statistics.median(links.between(links.latency) or [0.0]),
        cores=profile.cores,
        sharing=profile.ranks,
        per_byte=profile.per_byte,
        per_hop=profile.per_message,
        near_rate=min((rate for rate in near if rate is not None), default=math.inf) / 8,
        near_latency=max((each for each in inside if each is not None), default=_LATENCY),
        rates=tuple(each / 8 for each in LinkRates(links.rate_both_ways, links.ranks).of_nodes())
        if nodes > 1
        else (),
    )


def of_ring(nodes: int, ranks: int, rate: float, latency: float, profile: Profile) -> Network:
    """The cluster of the profile, on which a ring of all ranks has this rate, in bytes/s, and latency."""
    return Network(
        nodes=nodes,
        ranks=ranks,
        rate=rate,
        latency=latency,
        cores=profile.cores,
        sharing=profile.ranks,
        per_byte=profile.per_byte,
        per_hop=profile.per_message,
    )


def described(
    nodes: int,
    ranks: int,
    rates: Sequence[float | None],
    latency: float,
    profile: Profile,
    *,
    cores: float | None = None,
    emulated: bool = False,
) -> Network:
    """A cluster that one does not have.

    Args:
        rates: bit/s of the nodes' links; None: as fast as the processors.
        latency: seconds that a link adds, one way.
        cores: of each node; None: as many as its ranks can use.
        emulated: whether all nodes are on the machine of the profile, as in the testbed.
    """
    slowest = min((rate for rate in rates if rate is not None), default=math.inf)
    uneven = len({*rates}) > 1
    own = ranks * (profile.threads + 1) if cores is None else cores
    return Network(
        nodes=nodes,
        ranks=ranks,
        rate=slowest * FRAMES / 8,
        latency=latency + _LATENCY,
        cores=profile.cores if emulated else own,
        sharing=nodes * ranks if emulated else ranks,
        per_byte=profile.per_byte,
        per_hop=profile.per_message,
        rates=tuple((rate or math.inf) * FRAMES / 8 for rate in rates) if uneven else (),
    )


def strategy_on(network: Network, strategy: AnyStrategy) -> AnyStrategy:
    """The strategy as it would be attached there: topologies that go by links are told their rates."""
    if isinstance(strategy, AutoStrategy):
        return strategy
    nodes = range(network.nodes)
    rates = [8 * rate for rate in network.rates or [network.rate] * network.nodes]
    matrix = tuple(
        tuple(each if math.isfinite(each := min(rates[i], rates[j])) else None for j in nodes) for i in nodes
    )
    ranks = tuple(tuple(range(i * network.ranks, (i + 1) * network.ranks)) for i in nodes)
    links = LinkRates(matrix, ranks)
    levels = tuple(replace(level, topology=made_for(level.topology, links)) for level in strategy.levels)
    return levels[0] if isinstance(strategy, Strategy) else replace(strategy, levels=levels)
