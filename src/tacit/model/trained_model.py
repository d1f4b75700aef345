"""The interface of a model for a session, whether DDP replicates it or FSDP2 shards each replica."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn


class TrainedModel(Protocol):
    """A DistributedDataParallel as it is, or a `ShardedModel`."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters and buffers are named."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks whose parameters are averaged: those of all replicas, or of the same shard of each."""

    @property
    def bucket_bytes_cap(self) -> int:
        """The most bytes of whole parameters in a bucket."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether backward may leave out parameters."""

    @property
    def parameters_to_ignore(self) -> Collection[str]:
        """The names of parameters and buffers that are not exchanged."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a DTensor, which shares its memory; else the tensor."""
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):  # importing the class would take seconds
        return tensor
    with torch.no_grad():
        mine: Tensor = sharded.detach().to_local()
    return mine


def sharded_as(p: Any, value: Any) -> Any:
    """A value of a sharded parameter's state, if it has the shape of the shard, as a DTensor laid out as `p`.

    Anything else stays what it is.
    """
    if not hasattr(p, "to_local") or not isinstance(value, Tensor) or value.shape != local(p).shape:
        return value
    kind, like = type(p.detach()), {"run_check": False, "shape": p.shape, "stride": p.stride()}
    return kind.from_local(value, p.device_mesh, p.placements, **like)


def locals_of(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of each tensor."""
    return {name: local(tensor) for name, tensor in named.items()}
