"""Every name that is private to torch's FSDP2, and that tacit uses; the others are in `torch_compat`.

They are in torch 2.9.0, 2.13.0 and 2.14.1, but where a function says since which version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_KINDS = ("AllGather", "ReduceScatter")


class ReduceGroup:
    """Parameters whose gradients FSDP2 reduces together: those that one `fully_shard` took.

    A face of its private `FSDPParamGroup`, to which `FSDPModule._get_fsdp_state` leads.

    Args:
        module: an FSDPModule.
        group: one of its groups.
    """

    def __init__(self, module: Any, group: Any) -> None:
        self._module, self._group = module, group

    @staticmethod
    def all_of(model: nn.Module, frozen: bool = False) -> Iterator[ReduceGroup]:
        """Those of the model with a parameter that is trained; `frozen`: the others too.

        By `FSDPState._fsdp_param_groups`; before torch 2.12 by `_fsdp_param_group`, the only one.
        """
        seen: set[int] = set()
        for each in model.modules():
            module: Any = each
            state = module._get_fsdp_state() if hasattr(module, "set_all_reduce_hook") else None
            for group in _param_groups(state):
                found = ReduceGroup(module, group)
                if id(group) not in seen and found.widths(frozen):
                    seen.add(id(group))
                    yield found

    def widths(self, frozen: bool = False) -> list[tuple[Tensor, int]]:
        """Each parameter that is trained, with the entries that it has in what a rank gets, padding included.

        `frozen`: the others too, as they are gathered.

        By `FSDPParam.sharded_param` and `padded_sharded_param_size`.
        """
        return [
            (each.sharded_param, each.padded_sharded_param_size.numel())
            for each in self._group.fsdp_params
            if frozen or each.sharded_param.requires_grad
        ]

    @property
    def gathers_by(self) -> Any:
        """What gathers its parameters; by `_all_gather_comm`."""
        return self._group._all_gather_comm

    @property
    def scatters_by(self) -> Any:
        """What reduces its gradients; by `_reduce_scatter_comm`."""
        return self._group._reduce_scatter_comm

    @property
    def takes_collectives(self) -> bool:
        """Whether others may be given: torch has `set_custom_all_gather`, and the module one group."""
        return hasattr(self._module, "set_custom_all_gather") and (
            len(_param_groups(self._module._get_fsdp_state())) == 1
        )

    @property
    def communicates_plainly(self) -> bool:
        """Whether nobody has given others; by the names of torch's own classes, as `DefaultAllGather`.

        Those that take memory from the process group are plain too; those of symmetric memory are not.
        """
        own = [f"{memory}{kind}" for memory in ("Default", "ProcessGroupAlloc") for kind in _KINDS]
        return all(type(each).__name__ in own for each in (self.gathers_by, self.scatters_by))

    @property
    def on_host(self) -> bool:
        """Whether its parameters are offloaded to the CPU; by `FSDPParam.offload_to_cpu`."""
        return any(each.offload_to_cpu for each in self._group.fsdp_params)

    def communicate(self, gather: Any = None, scatter: Any = None) -> None:
        """Give it what gathers parameters, or reduces gradients."""
        if gather is not None:
            self._module.set_custom_all_gather(gather)
        if scatter is not None:
            self._module.set_custom_reduce_scatter(scatter)

    @property
    def has_hook(self) -> bool:
        """Whether someone has given it an all-reduce hook; by `_all_reduce_hook`."""
        return self._group._all_reduce_hook is not None

    def hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """Give it the hook, by `set_all_reduce_hook`; or take it away, by `_all_reduce_hook`."""
        if hook is None:
            self._group._all_reduce_hook = None
        else:
            self._module.set_all_reduce_hook(hook)

    @property
    def all_reduces(self) -> bool:
        """Whether this backward is to be all-reduced: `set_requires_all_reduce`; by `all_reduce_grads`."""
        return bool(self._group.all_reduce_grads)

    @property
    def divide_factor(self) -> float | None:
        """What `set_gradient_divide_factor` has set; by `gradient_divide_factor`."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    def keeps_as_gradients(self, reduced: Tensor) -> bool:
        """Whether its gradients will be views of this tensor, and nobody reads them before backward ends.

        Not where torch divides it once more, converts it, or adds it to gradients that are there; nor where a
        hook of a parameter looks at its gradient. By `foreach_reduce`'s way in torch 2.13.
        """
        params = [param for param, _ in self.widths()]
        return (
            reduced.dtype in (torch.float32, torch.bfloat16)
            and not self._group.force_sum_reduction_for_comms
            and all(p.dtype == reduced.dtype and p.grad is None for p in params)
            and not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params)
        )


def _param_groups(state: Any) -> list[Any]:
    if state is None or hasattr(state, "_fsdp_param_groups"):
        return [] if state is None else [*state._fsdp_param_groups]
    return [each for each in (state._fsdp_param_group,) if each is not None]
