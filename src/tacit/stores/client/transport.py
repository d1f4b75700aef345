"""All parameter servers of a worker, and the transport that sends them its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from tacit.contracts import SERVER, WORLD, AxisRank, Collective, Posted, PushPull, Transport
from tacit.stores import encoding
from tacit.stores.client.server_connection import ServerClient
from tacit.stores.messages import RunSpec, ServerStats
from tacit.stores.protocol import FrameKind
from tacit.stores.secret import Secret
from tacit.stores.tls import TlsWorker
from tacit.transports.torch_distributed import TorchTransport


class ServerGroup:
    """The connections to all servers.

    Args:
        addresses: host and port of each.
        me: the number of this worker, and of all workers.
        timeout: after which a peer that does not answer is lost.
        homes: parameter -> the number of its server.
        run: the description of the run, equal on all workers; each server gets that of its parameters.
        secret: shared by servers and workers.
        average: whether the servers only average; else they keep the parameters.
        tls: which certificates of theirs are trusted; None: they speak no TLS.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        me: AxisRank,
        timeout: timedelta,
        homes: Mapping[str, int],
        run: RunSpec,
        secret: Secret,
        average: bool,
        tls: TlsWorker | None = None,
    ) -> None:
        self._homes = homes
        self.average = average
        self.each: list[ServerClient] = []
        try:
            for number, address in enumerate(addresses):
                mine = tuple(line for line in run.model if homes[line[0]] == number)
                theirs = replace(run, model=mine)
                self.each.append(ServerClient(number, address, me, timeout, theirs, secret, tls))
        except BaseException as error:
            for server in self.each:
                server.abort(error)
            raise

    def server_of(self, key: str) -> ServerClient:
        """The one that has the bucket whose first parameter is `key`."""
        return self.each[self._homes[key]]

    def abort(self, error: BaseException) -> None:
        """End all connections with this error."""
        for server in self.each:
            server.abort(error)

    def counts(self) -> dict[str, float]:
        """What this worker has pushed and pulled, summed over the servers; how stale its pushes were."""
        pushes = sum(server.counters.pushes for server in self.each)
        return {
            "push_bytes": sum(server.counters.pushed for server in self.each),
            "pull_bytes": sum(server.counters.pulled for server in self.each),
            "queue_seconds": sum(server.counters.queued for server in self.each),
            "staleness": sum(server.counters.stale for server in self.each) / max(1, pushes),
        }

    def stats(self) -> list[dict[str, Any]]:
        """What each server has counted; see `ServerProcess.stats`."""
        return [dict(encoding.read(server.call(FrameKind.STATS), ServerStats, {})) for server in self.each]


class BesidePeers:
    """Base of transports whose requests of the axis SERVER go elsewhere, and all others to `peers`."""

    peers: Transport

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """Those of the peers."""
        return self.peers.nodes

    def open(self, stages: Mapping[str, int]) -> None:
        """Make the process groups of the ranks. A collective call."""
        self.peers.open({axis: count for axis, count in stages.items() if axis != SERVER})

    def ranks(self, axis: str) -> Sequence[int]:
        """Those of the peers; on the axis SERVER, all."""
        return self.peers.ranks(WORLD if axis == SERVER else axis)

    def place(self, axis: str = WORLD) -> AxisRank:
        """This rank's position among the peers; on the axis SERVER, among all."""
        return self.peers.place(WORLD if axis == SERVER else axis)

    def global_rank(self, replica: int) -> int:
        """The peers' number of the replica."""
        return self.peers.global_rank(replica)


@dataclass(eq=False)
class StarTransport(BesidePeers):
    """A transport whose requests of the axis SERVER go to the servers, and all others to `peers`."""

    peers: TorchTransport
    servers: ServerGroup

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start it; see `contracts.Transport`."""
        if isinstance(request, PushPull):
            server, staged = self.servers.server_of(key), f"{key}/{stage}"
            return (server.post_long if self.servers.average else server.post)(request, staged)
        return self.peers.post(request, stage, key)

    def abort(self, error: BaseException | None = None) -> None:
        """End all pending requests with an error."""
        self.servers.abort(error or RuntimeError("the session has failed"))
        self.peers.abort(error)

    def close(self) -> None:
        """Leave the servers, and free the process groups for the next transport."""
        for server in self.servers.each:
            server.close()
        self.peers.close()
