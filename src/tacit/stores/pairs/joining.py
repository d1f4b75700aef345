"""How ranks find each other, and each asks those that it may ask. Collective calls."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tacit.contracts import WORLD, PairTopology
from tacit.errors import AttachError, PeerLost, ServerLost, of_ranks
from tacit.stores.client.connecting import open_channel
from tacit.stores.pairs.links import AnsweringLink, AskingLink
from tacit.stores.pairs.transport import Membership, PairTransport
from tacit.stores.protocol import Channel, FrameKind, Header
from tacit.stores.secret import Secret
from tacit.stores.server.listener import Listener, RejectionLog
from tacit.transports.network_interfaces import address_of
from tacit.transports.process_groups import channel_of, gather_texts, gathered, own_groups, ranks_of, sum_
from tacit.transports.torch_distributed import TorchTransport

_PORT_HINT = (
    "Ranks that average in pairs connect to each other directly, at ports that the system chooses: let them "
    "through, and set GLOO_SOCKET_IFNAME to the interface by which the machines reach each other"
)


def join(
    peers: TorchTransport, topology: PairTopology, members: Membership, seed: int, timeout: float
) -> PairTransport:
    """Connect the ranks. If one of them cannot be reached, all raise.

    The ranks recognize each other by a secret that the first of them draws and sends by the process group,
    which they trust anyway.

    Raises:
        AttachError: a rank cannot be reached.
    """
    here, known_as = peers.place(), ranks_of(peers.parent)
    transport = PairTransport(peers, topology, members, _GroupMean(peers), seed, peers.close)
    transport.open({WORLD: 1})
    asked_by = [rank for rank in range(here.peers) if here.rank in topology.partners(rank, here.peers)]
    secret = Secret(gather_texts(secrets.token_hex(32), peers.parent)[0].encode())
    door = _Door(transport, asked_by, timeout)
    host = _host()
    listener = Listener(host, 0, secret, door.admit, RejectionLog()) if asked_by else None
    try:
        homes = gather_texts(f"{host} {listener.port if listener else 0}", peers.parent)
        error, deadline = None, time.monotonic() + timeout
        try:
            for rank in topology.partners(here.rank, here.peers):
                home, port = homes[rank].split()
                left = deadline - time.monotonic()
                channel = open_channel((home, int(port)), secret, left, f"rank {known_as[rank]}")
                channel.send(Header(FrameKind.HELLO, sequence=here.rank))
                link = AskingLink(rank, channel, transport, timeout)
                transport.connect(link)
                link.start()
        except (ServerLost, AttachError, OSError) as failed:
            there, me = known_as[rank], known_as[here.rank]
            error = AttachError(f"rank {there} at {home}:{port} cannot be reached by rank {me}: {failed}")
        else:
            missing = door.missing(max(0.0, deadline - time.monotonic()))
            if missing:
                error = AttachError(
                    f"{of_ranks([known_as[rank] for rank in missing])} did not connect to rank "
                    f"{known_as[here.rank]} at {host}"
                )
        told = zip(known_as, _flags(peers, error is not None), strict=True)
        refused = [rank for rank, each in told if each]
        if refused:
            transport.abort(PeerLost(f"{of_ranks(refused)} could not be connected"))
            transport.close()
            raise error or AttachError(f"{of_ranks(refused)} could not be connected. {_PORT_HINT}")
    finally:
        if listener is not None:
            listener.close()
    return transport


def _flags(peers: TorchTransport, mine: bool) -> list[bool]:
    return [bool(each) for each in gathered(torch.tensor([int(mine)]), peers.parent)]


def _host() -> str:
    """An address of this machine that other ranks reach: Gloo's, or that of its route to the first rank."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    found = address_of(interface) if interface else None
    if found is not None:
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        try:
            way.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
            return str(way.getsockname()[0])
        except OSError:
            return "127.0.0.1"


class _Door:
    """Lets in those that may ask this rank, each once."""

    def __init__(self, transport: PairTransport, expected: Collection[int], timeout: float) -> None:
        self._transport, self._missing, self._timeout = transport, set(expected), timeout
        self._changed = threading.Condition()

    def admit(self, channel: Channel, address: str) -> None:
        """Receive the rank of a new connection, in a separate thread."""
        threading.Thread(target=self._greet, args=(channel,), name="tacit-pair", daemon=True).start()

    def _greet(self, channel: Channel) -> None:
        try:
            header = channel.header(self._timeout)
        except (OSError, TimeoutError):
            channel.close()
            return
        with self._changed:
            if header.kind != FrameKind.HELLO or header.sequence not in self._missing:
                channel.close()
                return
            link = AnsweringLink(header.sequence, channel, self._transport, self._timeout)
            self._transport.connect(link)
            self._missing.discard(header.sequence)
            self._changed.notify_all()
        link.start()

    def missing(self, seconds: float) -> list[int]:
        """Wait for all; returns those that have not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, seconds)
            return sorted(self._missing)


class _GroupMean:
    """The mean over some of the ranks, by a process group of theirs; `transport.Mean`."""

    def __init__(self, peers: TorchTransport) -> None:
        self._peers = peers

    def __call__(self, ranks: Sequence[int], xs: Sequence[Tensor]) -> None:
        peers = self._peers
        if len(ranks) == 1:
            return
        use = (channel_of(peers), "pairs")
        (group,) = own_groups(peers.parent, ranks, peers.timeout, "gloo", use, 1)
        for x in xs:
            sum_(x.mul_(1 / len(ranks)), group).wait()
