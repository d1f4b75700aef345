"""What a session needs of a model, whether DDP replicates it or FSDP2 shards each replica."""

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
        """At most so many bytes of whole parameters travel together."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether backward may leave parameters out."""

    @property
    def parameters_to_ignore(self) -> Collection[str]:
        """The names of parameters and buffers that are nobody's business."""


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: the shard of a DTensor, which shares its memory; else the tensor."""
    sharded: Any = tensor
    if not hasattr(sharded, "to_local"):  # the class is not imported for this: it takes seconds
        return tensor
    with torch.no_grad():
        mine: Tensor = sharded.detach().to_local()
    return mine


def locals_of(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What this rank has of each."""
    return {name: local(tensor) for name, tensor in named.items()}
