"""How the workers of a strategy join its parameter servers, and cut tensors into buckets for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch import Tensor

from tacit.contracts import AxisRank
from tacit.environment import WORKER, WORKERS
from tacit.errors import AttachError, TacitError
from tacit.stores.client import placement
from tacit.stores.client.buffers import homes_of
from tacit.stores.client.step_hook import OptimizerGroups
from tacit.stores.client.transport import ServerGroup, StarTransport
from tacit.stores.messages import ParameterSpec, RunSpec
from tacit.stores.tls import find_tls
from tacit.strategy import Strategy
from tacit.transports.torch_distributed import TorchTransport


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
    """Connect to the servers. A collective call of the workers: if one is refused, all raise.

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
    star = strategy.server
    assert star is not None
    beside = beside or {}
    homes = placement.homes(tensors, len(where)) | homes_of([*beside], len(where))
    cap = placement.message_cap(strategy, tensors, len(where), peers.parent.size(), cap)
    kinds = groups.of if groups is not None else dict.fromkeys(tensors)
    model: tuple[ParameterSpec, ...] = tuple(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), kinds.get(name))
        for name, p in {**tensors, **beside}.items()
    )
    run = RunSpec(star, () if groups is None else groups.rules, model)
    error: TacitError | None = None
    try:
        me, secret = _me(peers, strategy), placement.shared_secret()
        servers = ServerGroup(where, me, timeout, homes, run, secret, star.averages, find_tls())
    except TacitError as refused:
        error = refused
    refused_ranks = placement.ranks_that_set(peers.parent, error is not None)
    if error is not None:
        raise error
    if refused_ranks:
        servers.abort(AttachError("another worker was refused"))
        raise AttachError(f"ranks {refused_ranks} were refused by a parameter server: see their errors")
    return Joined(
        StarTransport(peers, servers),
        homes,
        cap,
        lambda names: placement.cut_by_server(names, tensors, homes, cap, kinds),
    )


def _me(peers: TorchTransport, strategy: Strategy) -> AxisRank:
    """The number of this worker: from the launcher, or its rank."""
    place = peers.place()
    if WORKER not in os.environ:
        return place
    worker, workers = (os.environ.get(name, "") for name in (WORKER, WORKERS))
    if not (worker.isdigit() and workers.isdigit() and int(worker) < int(workers)):
        raise AttachError(
            f"{WORKER}={worker!r} and {WORKERS}={workers!r} do not say which worker this is: write its "
            f"number from 0, and how many there are, such as {WORKER}=2 {WORKERS}=4"
        )
    if place.peers > 1 or not strategy.independent:
        raise AttachError(
            f"{WORKER}={worker} is for a worker that is started alone, of a strategy that goes on without "
            f"others, such as ps-async; this is one of {place.peers} ranks with {strategy.name!r}: unset it"
        )
    return AxisRank(int(worker), int(workers))
