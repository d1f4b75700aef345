"""The arguments of `attach`: models and optimizers are unwrapped, or refused with what to write."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tacit.errors import AttachError
from tacit.torch_compat import compiled_module


def ddp_of(model: object) -> DistributedDataParallel:
    """The DDP object: itself, or what `torch.compile` has wrapped.

    Raises:
        AttachError: there is none; says what to write.
    """
    inside = compiled_module(model)
    if isinstance(inside, DistributedDataParallel):
        return inside
    if isinstance(model, DistributedDataParallel):
        return model
    if isinstance(model, Optimizer):
        raise AttachError("the first argument is an optimizer: write attach(model, optimizer, ...)")
    if _sharded(model):
        raise AttachError(
            "the model is sharded (FSDP), and only DistributedDataParallel is supported as yet: wrap the "
            "unsharded model, attach(DistributedDataParallel(model), optimizer, ...)"
        )
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"the model is {_a(model)}: write attach(model, optimizer, ...), with a DistributedDataParallel "
            "as the model"
        )
    compiled = "torch.compile(DistributedDataParallel(model))" if inside is not None else None
    write = compiled or "DistributedDataParallel(model)"
    raise AttachError(
        f"the model is {_a(model)}, not a DistributedDataParallel: write attach({write}, optimizer, ...)"
    )


def optimizers_of(optimizer: object) -> list[Optimizer]:
    """The optimizers: one, several, or none; those that Accelerate or Lightning have wrapped, unwrapped.

    Raises:
        AttachError: one of them is no optimizer; says what to write.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer | nn.Module | str):
        return [_optimizer(each) for each in optimizer]
    return [_optimizer(optimizer)]


def _optimizer(given: Any) -> Optimizer:
    if isinstance(given, LRScheduler):
        raise AttachError(
            f"the optimizer is {_a(given)}, which is a schedule: give attach the optimizer that it was made "
            "for; it may change the rate all the same"
        )
    if isinstance(given, nn.Module):
        raise AttachError("the second argument is a model: write attach(model, optimizer, ...)")
    # Accelerate's wrapper says that it is an Optimizer, and has none of an Optimizer's hooks.
    inside = getattr(given, "optimizer", None)
    if isinstance(inside, Optimizer):
        return _optimizer(inside)
    if not isinstance(given, Optimizer):
        raise AttachError(
            f"the optimizer is {_a(given)}: give attach a torch.optim.Optimizer of model.parameters(), or a "
            "list of several"
        )
    return given


def _sharded(model: object) -> bool:
    # Who has a sharded model has imported this; importing it here would cost every process a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)


def _a(thing: object) -> str:
    name = type(thing).__name__
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
