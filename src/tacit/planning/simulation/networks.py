"""The links and processors of a measured cluster, for the clock."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from tacit.contracts import LinkRates, made_for
from tacit.links import Links
from tacit.planning.profile import GpuLinks, Profile
from tacit.planning.simulation.clock import Network
from tacit.strategy import AnyStrategy, AutoStrategy, Strategy
from tacit.transports.process_groups import connections

LATENCY = 7e-5
"""Seconds of a small message between two machines, without the link's latency."""


def measured(links: Links, profile: Profile) -> Network:
    """The cluster on which links and profile were measured.

    A ring is as fast as its slowest pair of neighbours that send to each other at once. Several connections
    (`TACIT_CONNECTIONS`) carry at most as much as the streams that were measured at once.
    """
    nodes = len(links.ranks)
    neighbours = [(i, (i + 1) % nodes) for i in range(nodes)]
    rates = [links.rate_both_ways[i][j] for i, j in neighbours if i != j]
    near = [links.rate_both_ways[i][i] for i in range(nodes)]
    inside = [links.latency[i][i] for i in range(nodes)]
    rate = min((rate for rate in rates if rate is not None), default=math.inf) / 8
    latency = statistics.median(links.between(links.latency) or [0.0])
    flows = zip(links.between(links.rate_of_flows), links.between(links.rate), strict=True)
    gain = statistics.median([many / one for many, one in flows] or [1.0])
    return replace(
        of_ring(nodes, len(links.ranks[0]), rate, latency, profile),
        near_rate=min((rate for rate in near if rate is not None), default=math.inf) / 8,
        near_latency=max((each for each in inside if each is not None), default=LATENCY),
        rates=tuple(each / 8 for each in LinkRates(links.rate_both_ways, links.ranks).of_nodes())
        if nodes > 1
        else (),
        connections=max(1.0, min(gain, connections())),
    )


def of_ring(nodes: int, ranks: int, rate: float, latency: float, profile: Profile) -> Network:
    """The cluster of the profile, on which a ring of all ranks has this rate, in bytes/s, and latency.

    That is a ring of Gloo's. Those between GPUs are as they were measured where the profile was taken.
    """
    return Network(
        nodes=nodes,
        ranks=ranks,
        rate=rate,
        latency=latency,
        cores=profile.cores,
        sharing=profile.ranks,
        per_byte=profile.per_byte,
        per_hop=profile.per_message,
        gpu=GpuLinks() if profile.gpu is None else profile.gpu.links,
    )


def between_gpus(network: Network, profile: Profile) -> Network:
    """The network whose GPUs reach other nodes as its processors do, and each other as in the profile.

    Where the profile was taken on nodes of one rank, what is between the GPUs of a node is not known, and is
    taken to be as fast as copies to the host and back.
    """
    if profile.gpu is None:
        return network
    gpu = profile.gpu
    near = gpu.links.near_rate or min(gpu.down, gpu.up) / 2
    links = GpuLinks(network.rate, network.latency, near, gpu.links.near_latency)
    return replace(network, gpu=links)


def strategy_on(network: Network, strategy: AnyStrategy) -> AnyStrategy:
    """The strategy as it would be attached there: topologies that depend on links get the rates."""
    if isinstance(strategy, AutoStrategy) or not any(each.topology.needs_rates for each in strategy.levels):
        return strategy
    nodes = range(network.nodes)
    rates = [8 * rate for rate in network.rates or [network.rate] * network.nodes]
    matrix = tuple(
        tuple(each if math.isfinite(each := min(rates[i], rates[j])) else None for j in nodes) for i in nodes
    )
    ranks = tuple(tuple(range(i * network.ranks, (i + 1) * network.ranks)) for i in nodes)
    links = LinkRates(matrix, ranks, network.latency)
    levels = tuple(replace(level, topology=made_for(level.topology, links)) for level in strategy.levels)
    return levels[0] if isinstance(strategy, Strategy) else replace(strategy, levels=levels)
