"""Gradients of a model that FSDP2 shards: its all-reduce hook, which is called after a reduce-scatter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tacit.errors import AttachError
from tacit.gradients.ddp_hook import BucketFuture, HookDispatcher
from tacit.model.not_copied import OnlyHere
from tacit.model.sharded_model import Reduction, ShardedModel
from tacit.model.torch_modes import shielded
from tacit.torch_compat import at_end_of_backward
from tacit.torch_fsdp import ReduceGroup

_log = logging.getLogger("tacit")


def reduced_together(model: ShardedModel, named: Mapping[str, Tensor]) -> list[dict[str, int]]:
    """The names of each module's parameters, with the number of entries in its reduced gradient.

    The last modules come first, as in backward. If a module's rows do not divide by the number of ranks, the
    gradient of some ranks has padding.
    """
    names = {id(p): name for name, p in named.items()}
    groups = reversed([*ReduceGroup.all_of(model.module)])
    return [{names[id(p)]: width for p, width in group.widths()} for group in groups]


@dataclass(frozen=True, eq=False)
class ReducedShards:
    """The reduced gradient of one module, flat, as DDP would give a bucket."""

    flat: Tensor
    params: list[Tensor]
    number: int
    of: int

    def buffer(self) -> Tensor:
        """The tensor that the mean overwrites."""
        return self.flat

    def parameters(self) -> list[Tensor]:
        """The parameters, in their order in `buffer`."""
        return self.params

    def index(self) -> int:
        """The number of reduced gradients before this one in the backward."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last one of the backward."""
        return self.number == self.of - 1


class ShardedGradients:
    """Passes the gradients of FSDP2's all-reduce hooks to the session, once for each module and exchange.

    The hook returns at once if the parameter's gradient will be a view of its tensor, and the mean is then
    there when backward ends; otherwise it waits for the mean.

    Args:
        model: has the hooks.
        named: its parameters.
        dispatcher: answers, as for DDP's hook.
        reduction: whether gradients are averaged along the far axis, or added.
        settle: launches the rest of exchanges that wait for numbers of the device (`Lanes.settle`).

    Raises:
        AttachError: a module has an all-reduce hook already.
    """

    def __init__(
        self,
        model: ShardedModel,
        named: Mapping[str, Tensor],
        dispatcher: HookDispatcher,
        reduction: Reduction,
        settle: Callable[[], None],
    ) -> None:
        self._settle = settle
        self._groups = [*ReduceGroup.all_of(model.module)]
        self._names = {id(p): name for name, p in named.items()}
        self._dispatcher = dispatcher
        self._factor = model.process_group.size() if reduction == "sum" else 1
        self._arrived: dict[int, None] = {}
        self._partial: dict[int, Tensor] = {}
        self._landing: list[tuple[BucketFuture, Tensor]] = []
        self._over = False
        self._failure: Exception | None = None
        self._handle: RemovableHandle | None = None
        for group in self._groups:
            if group.has_hook:
                raise AttachError(
                    f"{self._first(group)} is of a module that has an all-reduce hook already, and FSDP2 "
                    "takes one: leave set_all_reduce_hook out"
                )
        self._warn_of_sums(model, reduction)
        self._module = model.module

    def _warn_of_sums(self, model: ShardedModel, reduction: Reduction) -> None:
        sums = [group for group in self._groups if group.divide_factor == 1.0]
        if sums and reduction == "mean" and model.shards > 1 and model.process_group.rank() == 0:
            _log.warning(
                "set_gradient_divide_factor(1.0) makes FSDP2 add the gradients of a replica's ranks, and "
                "those "
                "of replicas are averaged: if your loss is divided by the samples or tokens of all ranks, "
                "write attach(..., reduction='sum')"
            )

    def install(self) -> None:
        """Register the hooks."""
        for i, group in enumerate(self._groups):
            group.hook(shielded(partial(self._reduced, i)))
        self._handle = self._module.register_forward_pre_hook(OnlyHere(self._before_forward))

    def remove(self) -> None:
        """Remove the hooks: FSDP2 then reduces gradients on its near axis alone."""
        for group in self._groups:
            group.hook(None)
        if self._handle is not None:
            self._handle.remove()

    def check(self, *_: Any) -> None:
        """Check, before a step, that all gradients have been exchanged.

        Raises:
            AttachError: not all gradients have been exchanged.
        """
        if self._partial:
            raise AttachError(
                f"the gradient of {self._first(self._groups[min(self._partial)])} has not been exchanged, as "
                "set_requires_all_reduce(False) was on in its last backward of the step: write "
                "model.set_requires_all_reduce(is_last) before each backward"
            )
        if self._arrived:
            raise self._incomplete()

    # ---- in backward ----------------------------------------------------------------------------------

    def _reduced(self, i: int, flat: Tensor) -> None:
        """FSDP2's hook of group `i`; overwrites `flat`."""
        group = self._groups[i]
        params = self._whole(group, flat)
        if not group.all_reduces:
            kept = self._partial.get(i)
            self._partial[i] = flat.clone() if kept is None else kept.add_(flat)
            flat.zero_()
            return
        if i in self._arrived:
            raise AttachError(
                f"{self._first(group)} has two gradients before {self._first(self._missing()[0])} has one: "
                "add up the losses of a step's forward, and call backward once"
            )
        before = self._partial.pop(i, None)
        if before is not None:
            flat.add_(before)
        later = before is None and group.keeps_as_gradients(flat)
        bucket: Any = ReducedShards(flat, params, len(self._arrived), len(self._groups))
        self._arrived[i] = None
        if bucket.index() == 0:
            self._over = False
            at_end_of_backward(shielded(self._ended))
        if bucket.is_last():
            self._arrived.clear()
        try:
            self._landing.append((self._dispatcher.answer(bucket), flat))
        except Exception as error:  # the round has failed, see `_land`
            self._failure = self._failure or error
        if not later:
            self._land()

    def _land(self) -> None:
        """Wait for the means under way.

        A failure is raised when backward ends: a rank that left it earlier would not take part in what FSDP2
        does for its other modules, and the ranks of its replica would wait for it.
        """
        self._settle()  # else a mean whose bucket is not the last one of the round never comes
        for future, flat in self._landing:
            try:
                future.wait()
            except Exception as error:
                self._failure = self._failure or error
                continue
            if self._factor != 1:
                flat.mul_(self._factor)
            if flat.is_cuda:  # FSDP2 may give its memory away while this stream still reads it
                flat.record_stream(torch.cuda.current_stream(flat.device))
        self._landing.clear()

    def _whole(self, group: ReduceGroup, flat: Tensor) -> list[Tensor]:
        """The group's parameters; an error if `flat` does not have all of them."""
        widths = group.widths()
        expected = sum(width for _, width in widths)
        if flat.numel() != expected:
            flag = "set_reduce_scatter_unused_params"
            write = f"write model.{flag}(True) after fully_shard, or " if hasattr(self._module, flag) else ""
            raise AttachError(
                f"of a module with {self._first(group)} {flat.numel()} of {expected} entries have had a "
                f"gradient, as forward did not use all of its parameters: {write}freeze what is not used "
                "before you attach"
            )
        return [p for p, _ in widths]

    # ---- incomplete backward passes
    # --------------------------------------------------------------------------

    def _ended(self) -> None:
        """Note that backward is over, FSDP2's part included."""
        self._over = True
        self._land()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _before_forward(self, *_: object) -> None:
        """Reset, if the last backward has failed."""
        if self._arrived and self._over:
            raise self._incomplete()
        self._land()
        self._arrived.clear()

    def _incomplete(self) -> AttachError:
        missing = self._missing()
        self._arrived.clear()
        return AttachError(
            f"a backward gave no gradient to {self._first(missing[0])}, nor to anything else of its module, "
            "and others had theirs exchanged: have every forward use all modules, or freeze what is not used "
            "before you attach"
        )

    def _missing(self) -> list[ReduceGroup]:
        return [group for i, group in enumerate(self._groups) if i not in self._arrived]

    def _first(self, group: ReduceGroup) -> str:
        return next(self._names[id(p)] for p, _ in group.widths())
