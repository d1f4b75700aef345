"""How the workers of a strategy join its parameter servers, and cut tensors into buckets for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from tacit.stores.client import placement
from tacit.stores.client.buffers import homes_of
from tacit.stores.client.step_hook import OptimizerGroups
from tacit.stores.client.transport import StarTransport
from tacit.strategy import Strategy
from tacit.transports.torch import TorchTransport


@dataclass(frozen=True, eq=False)
class Joined:
    """Servers that have let this worker in.

    Attributes:
        homes: which server has which tensor.
        cap: bytes that travel together, at most.
        cut: cuts tensors into buckets, each on one server.
    """

    transport: StarTransport
    homes: Mapping[str, int]
    cap: int
    cut: Callable[[list[str]], list[list[str]]]


def join_servers(
    strategy: Strategy,
    where: placement.Addresses,
    peers: object,
    tensors: Mapping[str, Tensor],
    cap: int,
    timeout: timedelta,
    groups: OptimizerGroups | None = None,
    beside: Mapping[str, Tensor] | None = None,
) -> Joined:
    """Connect to the servers. A collective call of the workers.

    Args:
        strategy: uses the servers.
        where: their addresses.
        peers: the transport among the workers.
        tensors: the tensors to exchange.
        cap: the most bytes of a bucket without servers.
        timeout: after which a server that does not answer is an error.
        groups: the optimizer's groups, if the servers step.
        beside: buffers that no step moves, which servers also keep.

    Raises:
        AttachError: a server has refused a worker.
        ServerLost: one cannot be reached.
    """
    assert isinstance(peers, TorchTransport), "no server is on a GPU"
    beside = beside or {}
    homes = placement.homes(tensors, len(where)) | homes_of([*beside], len(where))
    cap = placement.message_cap(strategy, tensors, len(where), peers.parent.size(), cap)
    kinds = groups.of if groups is not None else dict.fromkeys(tensors)
    rules = groups.rules if groups is not None else ()
    transport = placement.connect(
        *(peers, strategy, {**tensors, **beside}, where, homes, timeout), *(rules, kinds)
    )
    return Joined(
        transport, homes, cap, lambda names: placement.cut_by_server(names, tensors, homes, cap, kinds)
    )
