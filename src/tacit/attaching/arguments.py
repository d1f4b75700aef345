"""The arguments of `attach`: models and optimizers are unwrapped, or refused with what to write."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tacit import checks
from tacit.errors import AttachError
from tacit.model.sharded_model import ShardedModel
from tacit.torch_compat import compiled_module, fabric_module

_FABRIC = (
    "With Fabric, on two ranks or more: after model, optimizer = fabric.setup(model, optimizer), where "
    'Fabric(strategy="ddp", ...) wraps it'
)
_WRAPPED_BY = {
    "accelerate": "With Accelerate, on two ranks or more: after model, optimizer = "
    "accelerator.prepare(model, optimizer), which wraps it",
    "lightning.fabric": _FABRIC,
    "lightning_fabric": _FABRIC,
}
"""Frameworks that wrap models, by the name of a module, and what to write if one has not wrapped the model.
"""


def check_kinds(policy: object, timeout: object, mesh: object) -> None:
    """Refuse arguments of `attach` of wrong types, whether or not the strategy uses them.

    Raises:
        AttachError: the message says what to write.
    """
    if policy is not None and (isinstance(policy, type) or not callable(policy)):
        raise AttachError(
            f"policy={_shown(policy)} is no function: write policy=lambda name, parameter: ..., which "
            "returns a Compressor, or None to keep the parameter dense"
        )
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        seconds = f"{timeout:g}" if checks.is_real(timeout) and timeout > 0 else "60"  # type: ignore[operator]
        raise AttachError(
            f"timeout={_shown(timeout)} is no datetime.timedelta above 0: write "
            f"timeout=datetime.timedelta(seconds={seconds})"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise AttachError(
            f"mesh={_shown(mesh)} is no DeviceMesh: write "
            'mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (nodes, ranks_per_node))'
        )


def model_of(
    model: object, mesh: DeviceMesh | None, group: dist.ProcessGroup | None, members: bool = False
) -> DistributedDataParallel | ShardedModel:
    """The DDP object, or the model that FSDP2 shards, with the ranks that have the same shards.

    Args:
        model: compiled or not.
        mesh: the mesh of a sharded model; ignored for other models.
        group: the ranks with the same shards, in place of a mesh.
        members: whether replicas come and go.

    Raises:
        AttachError: it is neither, or does not fit; the message says what to write.
    """
    model = _out_of_fabric(model)
    inside = compiled_module(model)
    module = model if inside is None else inside
    if isinstance(module, nn.Module) and not isinstance(module, DistributedDataParallel) and _sharded(module):
        from tacit.fsdp.model import sharded_of

        return sharded_of(module, mesh, group, members)
    if group is not None:
        raise AttachError(
            "group= is for sharded models (FSDP2): DistributedDataParallel(model, process_group=group) says "
            "which ranks have replicas"
        )
    return ddp_of(model)


def ddp_of(model: object) -> DistributedDataParallel:
    """The DDP object: the model itself, or the one that `torch.compile` or Fabric has wrapped.

    Raises:
        AttachError: there is none; the message says what to write.
    """
    model = _out_of_fabric(model)
    inside = compiled_module(model)
    if isinstance(inside, DistributedDataParallel):
        return inside
    if isinstance(model, DistributedDataParallel):
        return model
    if isinstance(model, Optimizer):
        raise AttachError("the first argument is an optimizer: write attach(model, optimizer, ...)")
    if _sharded(model):
        raise AttachError(
            "the model is sharded (FSDP2), which has no communication hook: write "
            "tacit.attach(model, optimizer, 'diloco', mesh=mesh)"
        )
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"the model is {_a(model)}: write attach(model, optimizer, ...), with a DistributedDataParallel "
            "as the model"
        )
    compiled = "torch.compile(DistributedDataParallel(model))" if inside is not None else None
    write = compiled or "DistributedDataParallel(model)"
    loaded = [line for name, line in _WRAPPED_BY.items() if name in sys.modules]
    raise AttachError(
        f"the model is {_a(model)}, not a DistributedDataParallel: write attach({write}, optimizer, ...)"
        + "".join(f". {line}" for line in dict.fromkeys(loaded))
    )


def optimizers_of(optimizer: object) -> list[Optimizer]:
    """The optimizers: one, several, or none; those that Accelerate or Lightning have wrapped, unwrapped.

    Raises:
        AttachError: one of them is no optimizer; the message says what to write.
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
    if not hasattr(given, "param_groups"):
        raise AttachError(
            f"the optimizer is {_a(given)} without param_groups: give attach the optimizer that it steps, or "
            "call super().__init__(params, defaults) in its __init__"
        )
    return given


def _out_of_fabric(model: object) -> object:
    inside = fabric_module(model)
    return model if inside is None else inside


def _sharded(model: object) -> bool:
    # A sharded model has imported this; importing it here would cost every process a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, nn.Module):
        return False
    if any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules()):
        raise AttachError(
            "the model is a FullyShardedDataParallel (FSDP1), and only FSDP2 is supported: write "
            'torch.distributed.fsdp.fully_shard(model, mesh=mesh["near"])'
        )
    return any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def _shown(given: object) -> str:
    return given.__name__ if isinstance(given, type) else repr(given)


def _a(thing: object) -> str:
    name = type(thing).__name__
    return f"an {name}" if name[:1] in "AEIOU" else f"a {name}"
