"""A replica of one process beside replicas that FSDP2 shards: it takes part as if it had each of the shards.

FSDP2 cuts parameters by their first dimension, so a shard is a view of a whole parameter. For each shard
there is a model whose parameters are these views, laid out as FSDP2's, and a face of each optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.errors import AttachError
from tacit.levels.spec import AttachSpec
from tacit.model.sharded_model import ShardedModel
from tacit.model.trained_model import local
from tacit.optimizer_hooks.closures import closure_of, with_gradients
from tacit.torch_compat import mesh_of_one, shard_of, share_buffers
from tacit.transports.process_groups import ranks_of


def shards_of(spec: AttachSpec, shards: int) -> list[AttachSpec]:
    """The arguments of `attach` for each shard of a model that one process has whole.

    Raises:
        AttachError: FSDP2 could not shard the model, or BatchNorm's statistics would be another shard's.
    """
    model = cast(DistributedDataParallel, spec.model)
    for name, p in model.module.named_parameters():
        if not p.dim():
            raise AttachError(
                f"{name} has no dimension, and FSDP2 shards the first one: make it a tensor of 1 entry, "
                "torch.zeros(1)"
            )
    for name, each in model.module.named_modules():
        if getattr(each, "running_mean", None) is not None:
            raise AttachError(
                f"{name} keeps running statistics, of which each rank of a sharded replica has its own: use "
                "LayerNorm, GroupNorm or track_running_stats=False beside sharded replicas"
            )
    return [_shard_of(spec, model, shards, number) for number in range(shards)]


def _shard_of(spec: AttachSpec, model: DistributedDataParallel, shards: int, number: int) -> AttachSpec:
    device = next(model.module.parameters()).device.type
    views = Views(mesh_of_one(device, shards, number), number)
    of = {p: nn.Parameter(views.of(p), p.requires_grad) for p in model.module.parameters()}
    group, ranks = model.process_group, ranks_of(model.process_group)
    sharded = ShardedModel(_alike(model.module, of), group, None, views.mesh, ranks)
    optimizers = cast(list[Optimizer], [OptimizerShard(each, of, views) for each in spec.optimizers])
    return replace(spec, model=sharded, optimizers=optimizers)


def _alike(module: nn.Module, of: Mapping[Tensor, nn.Parameter]) -> nn.Module:
    """A module that has these parameters in place of its own, and the same buffers."""
    made = nn.Module()
    for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
        made.register_parameter(name, of[p])
    share_buffers(module, made)
    for name, child in module.named_children():
        made.add_module(name, _alike(child, of))
    return made


def let_go(spec: AttachSpec) -> None:
    """Remove the hooks by which a shard's optimizers follow the whole ones."""
    for each in spec.optimizers:
        shard: Any = each
        for handle in shard.handles:
            handle.remove()


class Views:
    """Views of tensors as one of the shards into which FSDP2 would cut them.

    Attributes:
        mesh: of the ranks that would have them; number: the shard's.
    """

    def __init__(self, mesh: DeviceMesh, number: int) -> None:
        self.mesh, self.number = mesh, number

    def rows(self, whole: Tensor) -> Tensor:
        """The shard's rows, in the same memory; the last shards may have fewer, or none."""
        size = -(-len(whole) // self.mesh.size())
        first = min(self.number * size, len(whole))
        return whole.detach()[first : first + size]

    def of(self, whole: Tensor) -> Tensor:
        """The shard, as FSDP2 has it: a DTensor."""
        return shard_of(whole, self.rows(whole), self.mesh)


class OptimizerShard:
    """An optimizer as a rank has it that has one shard of each parameter.

    To `isinstance` it is of the whole one's class, and what is not here is the whole one's.

    Args:
        whole: steps the whole parameters.
        of: the shard's parameters.
        views: makes views of its state and of gradients.

    Attributes:
        whole_optimizer: as the argument `whole`.
        handles: of its own hooks, while others have some.
    """

    def __init__(self, whole: Optimizer, of: Mapping[Tensor, nn.Parameter], views: Views) -> None:
        self.whole_optimizer, self._of, self._views = whole, of, views
        self._kept: dict[tuple[Tensor, str], tuple[Tensor, Tensor]] = {}
        self._places = {p: p.data_ptr() for p in of}
        self.state = _States({part: p for p, part in of.items()}, self._fields, whole)
        self.handles: list[RemovableHandle] = []

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.whole_optimizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole_optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the whole one, with the shard's parameters."""
        return [
            {**group, "params": [self._of.get(p, p) for p in group["params"]]}
            for group in self.whole_optimizer.param_groups
        ]

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Have a hook called before a step of the whole one, with this object."""
        self._follow()
        return self.whole_optimizer.register_step_pre_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Have a hook called after a step of the whole one, with this object."""
        self._follow()
        return self.whole_optimizer.register_step_post_hook(lambda _, args, kwargs: hook(self, args, kwargs))

    def state_dict(self) -> dict[str, Any]:
        """The shard's state, by the numbers of parameters."""
        numbered = enumerate(p for group in self.param_groups for p in group["params"])
        return {"state": {i: self.state[p] for i, p in numbered if p in self.state}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Overwrite the shard's rows of the whole one's state, which begins with zeros."""
        whole = self.whole_optimizer.state_dict()
        params = [p for group in self.whole_optimizer.param_groups for p in group["params"]]
        for i, fields in state_dict["state"].items():
            there = whole["state"].setdefault(i, {})
            for field, value in fields.items():
                if not hasattr(value, "to_local"):
                    there[field] = value
                    continue
                if field not in there:
                    there[field] = torch.zeros_like(params[i])
                self._views.rows(there[field]).copy_(local(value))
        self.whole_optimizer.load_state_dict(whole)

    def _fields(self, p: Tensor) -> dict[str, Any]:
        return {field: self._view(p, field, value) for field, value in self.whole_optimizer.state[p].items()}

    def _view(self, p: Tensor, field: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != p.shape:
            return value
        kept = self._kept.get((p, field))
        if kept is None or kept[0] is not value:
            kept = self._kept[p, field] = value, self._views.of(value)
        return kept[1]

    def _follow(self) -> None:
        """See gradients before all others that have hooks here."""
        if not self.handles:
            self.handles = [
                self.whole_optimizer.register_step_pre_hook(with_gradients(self._see_gradients)),
                self.whole_optimizer.register_step_post_hook(self._forget_gradients),
            ]

    def _see_gradients(self, _: Optimizer) -> None:
        for p, part in self._of.items():
            if p.data_ptr() != self._places[p]:
                raise AttachError(
                    "a parameter lies elsewhere in memory than when the session began, as model.to(...) puts "
                    "it, and what is exchanged is there: close the session, and attach again"
                )
            part.grad = None if p.grad is None else self._views.of(p.grad)

    def _forget_gradients(self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is None:  # else they are asked for after the step, too
            for part in self._of.values():
                part.grad = None


class _States(Mapping[Tensor, dict[str, Any]]):
    """The state of each parameter of a shard that has one."""

    def __init__(
        self, whole_of: Mapping[Tensor, Tensor], fields: Callable[[Tensor], dict[str, Any]], whole: Optimizer
    ) -> None:
        self._whole_of, self._fields, self._whole = whole_of, fields, whole

    def __getitem__(self, part: Tensor) -> dict[str, Any]:
        if part not in self:
            raise KeyError(part)  # the whole one's would make an entry for it
        return self._fields(self._whole_of[part])

    def __contains__(self, part: object) -> bool:
        return self._whole_of.get(cast(Tensor, part)) in self._whole.state

    def __iter__(self) -> Iterator[Tensor]:
        return (part for part in self._whole_of if part in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
