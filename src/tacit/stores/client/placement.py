"""Where parameter servers are, and which of them holds which parameters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import Matrix
from tacit.environment import SERVER_SECRET, SERVER_SECRET_FILE, SERVERS
from tacit.errors import AttachError, ConfigError
from tacit.session.buckets import group_names
from tacit.stores import secret as secrets
from tacit.stores.secret import Secret
from tacit.strategy import Strategy
from tacit.transports.message_layout import nbytes
from tacit.transports.meter import like
from tacit.transports.process_groups import gathered

Addresses = Sequence[tuple[str, int]]

_BUCKETS_A_SERVER = 16
_LEAST_MESSAGE = 1 << 20


def addresses(text: str) -> list[tuple[str, int]]:
    """`"host:port,host:port"` as pairs.

    Raises:
        ConfigError: it is not of that form.
    """
    found = []
    for each in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = each.rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
            raise ConfigError(f"{each!r} is no address of a server: write host:port, such as 10.0.0.5:29600")
        found.append((host, int(port)))
    return found


def find_servers(given: Sequence[str] | None) -> Addresses:
    """The servers' addresses: the user's, or those of TACIT_SERVERS; empty: there are none.

    Raises:
        AttachError: there are some, and no secret that they share with the workers.
        ConfigError: one is no address.
    """
    where = addresses(os.environ.get(SERVERS, "") if given is None else ",".join(given))
    if where:
        shared_secret()
    return where


def shared_secret() -> Secret:
    """The secret that workers and servers share.

    Raises:
        AttachError: it is not there, or cannot be used.
    """
    try:
        secret = secrets.find_secret()
    except ConfigError as error:
        raise AttachError(str(error)) from error
    if secret is None:
        raise AttachError(
            "there is no secret by which servers, or a hub, and those who call them would know each other: "
            f"set {SERVER_SECRET} to the same 16 bytes or more for all of them, or "
            f"{SERVER_SECRET_FILE} to a file with these that only you can read ({secrets.MAKE} makes them)"
        )
    return secret


def homes(tensors: Mapping[str, Tensor], servers: int) -> dict[str, int]:
    """Which server holds which parameter: about as many bytes each, the largest parameters first.

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


def message_cap(
    strategy: Strategy, tensors: Mapping[str, Tensor], servers: int, workers: int, cap: int
) -> int:
    """The most bytes of parameters in one bucket, up to DDP's `cap`.

    A server answers a bucket when it has all of it, while it receives the next one. With n buckets, a round
    takes 1 + 1 / n times as long as a push alone, and not twice as long. So a server has many buckets, unless
    compressed ones would be so small that the messages themselves cost more.
    """
    share = _largest_share(strategy, workers)
    if share is None:
        return cap
    size = sum(p.numel() * p.element_size() for p in tensors.values())
    return min(cap, int(max(_LEAST_MESSAGE / share, size / (servers * _BUCKETS_A_SERVER))))


def _largest_share(strategy: Strategy, workers: int) -> float | None:
    """The larger of a push and its reply, as a share of the parameters' bytes; None: not known ahead."""
    side = 1 << 10
    matrix = Matrix(0, side, side)
    star, one_shot = strategy.server, strategy.compressor.with_layout((matrix,)).one_shot(0)
    if one_shot is None or star is None:
        return None
    x = torch.empty(side * side, device="meta", dtype=torch.float32)
    back = star.back(x)
    if star.pull is None and star.averages:
        back = replace(back, codec=one_shot.codec.of_sums(x.numel(), workers))
    push = replace(back, codec=one_shot.codec)
    return max(nbytes(like(piece)) for piece in (push, back)) / (4 * x.numel())


def cut_by_server(
    names: Sequence[str],
    tensors: Mapping[str, Tensor],
    homes: Mapping[str, int],
    cap: int,
    optimizer_of: Mapping[str, int | None] | None = None,
) -> list[list[str]]:
    """Cut parameters into buckets, in the order of the first parameter of each.

    Those of one bucket are on one server, and are stepped by one of the server's optimizers.
    """
    place = {name: i for i, name in enumerate(names)}
    kinds = {name: (homes[name], None if optimizer_of is None else optimizer_of[name]) for name in names}
    buckets = [
        bucket
        for kind in dict.fromkeys(kinds.values())
        for bucket in group_names([name for name in names if kinds[name] == kind], tensors, cap)
    ]
    return sorted(buckets, key=lambda bucket: place[bucket[0]])


def wait_for_all(group: dist.ProcessGroup) -> None:
    """Wait until all workers have entered: an earlier push would move the parameters where others start."""
    ranks_that_set(group, False)


def ranks_that_set(group: dist.ProcessGroup, mine_is_set: bool) -> list[int]:
    """The ranks whose flag is set."""
    mine = torch.tensor([int(mine_is_set)])
    return [rank for rank, theirs in enumerate(gathered(mine, group)) if int(theirs)]
