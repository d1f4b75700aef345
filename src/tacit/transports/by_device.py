"""The transport for a model on a GPU: each message goes by the backend for the memory that holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tacit.contracts import (
    WORLD,
    AllGather,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    Permute,
    Posted,
    PushPull,
)
from tacit.kernels.dispatch import on_host
from tacit.transports.torch_distributed import TorchTransport

HOST_STAGES = 3
"""The most collectives on an axis of an exchange on the host other than buckets (see `replicas.buffers`)."""


@dataclass(eq=False)
class ByDevice:
    """Two transports of the same ranks: one for tensors on the device, one for tensors on the host.

    Each is used in the same order on all ranks; neither waits for the other.
    """

    device: TorchTransport
    host: TorchTransport

    @property
    def nodes(self) -> Sequence[Sequence[int]]:
        """As of `contracts.Transport`."""
        return self.device.nodes

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent, by the formulas of ring collectives."""
        return self.device.sent + self.host.sent

    def open(self, stages: Mapping[str, int]) -> None:
        """Make one group an axis on the device; and on the host, groups for the few messages there."""
        self.device.open(stages)
        self.host.open({axis: min(count, HOST_STAGES) for axis, count in stages.items()})

    def ranks(self, axis: str) -> list[int]:
        """As of `contracts.Transport`."""
        return self.device.ranks(axis)

    def place(self, axis: str = WORLD) -> AxisRank:
        """As of `contracts.Transport`."""
        return self.device.place(axis)

    def global_rank(self, replica: int) -> int:
        """As of `contracts.Transport`."""
        return self.device.global_rank(replica)

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start a collective by the transport for the memory of its tensors."""
        chosen = self.host if on_host(_first(request)) else self.device
        return chosen.post(request, stage, key)

    def abort(self, error: BaseException | None = None) -> None:
        """End all collectives under way on both."""
        self.device.abort(error)
        self.host.abort(error)

    def close(self) -> None:
        """Leave the groups to the next transport."""
        self.device.close()
        self.host.close()


def _first(request: Collective) -> Tensor:
    """A tensor that the request sends."""
    found: Any
    match request:
        case AllReduce(payload) | AllGather(payload) | Permute(payload):
            found = payload[0]
        case AllToAll(payloads):
            found = next(tensor for payload in payloads for tensor in payload)
        case PushPull():
            raise AssertionError("a server was asked, and there is none")
        case _:
            found = request.x
    assert isinstance(found, Tensor)
    return found
