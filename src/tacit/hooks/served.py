"""Where a strategy has parameter servers: which there are, what each has, and how to get there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import AxisRank
from tacit.errors import AttachError, ConfigError, TacitError
from tacit.session.buckets import group_names
from tacit.strategy import AnyStrategy, Strategy
from tacit.topologies.auto import Auto
from tacit.topologies.star import Star
from tacit.transports import secret as secrets
from tacit.transports.devices import control
from tacit.transports.messages import About, Parameter, Rule
from tacit.transports.meter import like
from tacit.transports.secret import Secret
from tacit.transports.servers import VARIABLE, WORKER, WORKERS, Servers, StarTransport, addresses
from tacit.transports.torch import TorchTransport
from tacit.transports.wire import nbytes

Addresses = Sequence[tuple[str, int]]

_LOTS_OF_A_SERVER = 16
_LEAST_MESSAGE = 1 << 20


def served(strategy: AnyStrategy) -> bool:
    """Whether it needs servers."""
    return any(isinstance(level.topology, Star) for level in strategy.levels)


def may_be_served(strategy: AnyStrategy) -> bool:
    """Whether it uses servers where there are some."""
    return served(strategy) or any(
        isinstance(level.topology, Auto) and level.topology.at_servers for level in strategy.levels
    )


def resolved(strategy: AnyStrategy, where: Addresses) -> AnyStrategy:
    """The same, at its servers where it uses them and there are some."""
    if isinstance(strategy, Strategy) and where and not served(strategy):
        return replace(strategy, topology=Star())
    return strategy


def found(strategy: AnyStrategy, given: Sequence[str] | None) -> Addresses:
    """The servers' addresses: those that were given, or those that the launcher tells.

    Raises:
        AttachError: there are none and the strategy needs some, or the other way round.
        ConfigError: one is no address.
    """
    if not may_be_served(strategy):
        if given:
            raise AttachError(
                f"servers={given!r} with {strategy.name!r} would do nothing, as it has no parameter server: "
                "leave them out, or attach 'ps', say"
            )
        return ()
    where = addresses(os.environ.get(VARIABLE, "") if given is None else ",".join(given))
    if where:
        the_secret()
    if not where and served(strategy):
        raise AttachError(
            f"{strategy.name!r} needs a parameter server, and there is none: run with --servers 1 (tacit "
            "run, tacit compare), or start `python -m tacit.server --host HOST --port 29600 --workers N` and "
            f"write attach(..., servers=['HOST:29600']), or {VARIABLE}=HOST:29600"
        )
    return where


def the_secret() -> Secret:
    """What workers and servers share.

    Raises:
        AttachError: it is not there, or cannot be used.
    """
    try:
        secret = secrets.found()
    except ConfigError as error:
        raise AttachError(str(error)) from error
    if secret is None:
        raise AttachError(
            "there are parameter servers, and no secret by which they and the workers would know each other: "
            f"set {secrets.VARIABLE} to the same 16 bytes or more for all of them, or "
            f"{secrets.FILE_VARIABLE} to a file with these that only you can read ({secrets.MAKE} makes them)"
        )
    return secret


def homes(tensors: Mapping[str, Tensor], servers: int) -> dict[str, int]:
    """Which server has which parameter: about as many bytes each, the largest parameters first.

    Raises:
        AttachError: there are more servers than parameters.
    """
    if servers > len(tensors):
        raise AttachError(
            f"{servers} servers cannot share a model of {len(tensors)} parameters, of which each has one "
            f"home: use {len(tensors)} servers at most"
        )
    full = [0] * servers
    found: dict[str, int] = {}
    for name, p in sorted(
        tensors.items(), key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])
    ):
        home = min(range(servers), key=lambda i: (full[i], i))
        found[name] = home
        full[home] += p.numel() * p.element_size()
    return found


def lot_cap(
    strategy: Strategy, tensors: Mapping[str, Tensor], servers: int, workers: int, ddp_bucket: int
) -> int:
    """How many bytes of parameters travel in a bucket; at most those of DDP's `bucket`.

    A server answers a bucket when it has all of it, and answers one while it receives the next. With n
    buckets, a round takes 1 + 1 / n times as long as a push alone, and not twice as long: so a server has
    many buckets, unless compressed ones would be so small that messages themselves cost more.
    """
    share = _heavier(strategy, workers)
    if share is None:
        return ddp_bucket
    size = sum(p.numel() * p.element_size() for p in tensors.values())
    return min(ddp_bucket, int(max(_LEAST_MESSAGE / share, size / (servers * _LOTS_OF_A_SERVER))))


def _heavier(strategy: Strategy, workers: int) -> float | None:
    """The larger of a push and its answer, as a share of the parameters' bytes; None: not foretold."""
    star, one_shot = strategy.topology, strategy.compressor.one_shot(0)
    if one_shot is None or not isinstance(star, Star):
        return None
    x = torch.empty(1 << 20, device="meta")
    back = star.back(x)
    if star.pull is None and star.averages:
        back = replace(back, codec=one_shot.codec.of_sums(x.numel(), workers))
    push = replace(back, codec=one_shot.codec)
    return max(nbytes(like(piece)) for piece in (push, back)) / (4 * x.numel())


def cut_by_home(
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    homes: Mapping[str, int],
    cap: int,
    rules: Mapping[str, int | None] | None = None,
) -> list[list[str]]:
    """Buckets of parameters on one server and with one optimizer, in the order of the first of each."""
    place = {name: i for i, name in enumerate(names)}
    kinds = {name: (homes[name], None if rules is None else rules[name]) for name in names}
    buckets = [
        bucket
        for kind in dict.fromkeys(kinds.values())
        for bucket in group_names([name for name in names if kinds[name] == kind], tensors, cap)
    ]
    return sorted(buckets, key=lambda bucket: place[bucket[0]])


def connect(
    peers: TorchTransport,
    strategy: Strategy,
    tensors: Mapping[str, Tensor],
    where: Addresses,
    homes: Mapping[str, int],
    timeout: timedelta,
    rules: Sequence[Rule] = (),
    rule_of: Mapping[str, int | None] | None = None,
) -> StarTransport:
    """Join the servers. A collective call of the workers: if one is refused, all raise.

    `rules`: how a server steps, where it does; `rule_of`: which of them moves a parameter, None for none.

    Raises:
        AttachError: a server refuses this worker, or another one.
        ServerLost: a server cannot be reached.
    """
    rule_of = rule_of or {}
    model: tuple[Parameter, ...] = tuple(
        (name, tuple(p.shape), str(p.dtype).removeprefix("torch."), rule_of.get(name))
        for name, p in tensors.items()
    )
    star = strategy.topology
    assert isinstance(star, Star)
    about = About(star, tuple(rules), model)
    error: TacitError | None = None
    servers = None
    try:
        servers = Servers(where, _me(peers, strategy), timeout, homes, about, the_secret(), star.averages)
    except TacitError as refused:
        error = refused
    ill = _who(peers.parent, error is not None)
    if error is not None:
        raise error
    assert servers is not None
    if ill:
        servers.abort(AttachError("another worker was refused"))
        raise AttachError(f"ranks {ill} were refused by a parameter server: see what they say")
    return StarTransport(peers, servers)


def wait_for_all(peers: TorchTransport) -> None:
    """None pushes before all have entered: it would move where the others start."""
    _who(peers.parent, False)


def _me(peers: TorchTransport, strategy: Strategy) -> AxisRank:
    """Which worker this is: as the launcher says, or by its rank."""
    place = peers.place()
    if WORKER not in os.environ:
        return place
    worker, workers = (os.environ.get(name, "") for name in (WORKER, WORKERS))
    if not (worker.isdigit() and workers.isdigit() and int(worker) < int(workers)):
        raise AttachError(
            f"{WORKER}={worker!r} and {WORKERS}={workers!r} do not say which worker this is: write its "
            f"number from 0, and how many there are, such as {WORKER}=2 {WORKERS}=4"
        )
    if place.peers > 1 or not strategy.topology.independent:
        raise AttachError(
            f"{WORKER}={worker} is for a worker that is started alone, of a strategy that goes on without "
            f"others, such as ps-async; this is one of {place.peers} ranks with {strategy.name!r}: unset it"
        )
    return AxisRank(int(worker), int(workers))


def _who(group: dist.ProcessGroup, ill: bool) -> list[int]:
    mine = torch.tensor([int(ill)])
    all_ = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(all_, mine, group=control(group))
    return [rank for rank, theirs in enumerate(all_) if int(theirs)]
