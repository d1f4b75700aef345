"""The guard around Adam's steps that all policies for its variance share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from tacit.errors import AttachError
from tacit.model.trained_model import local
from tacit.optimizer_hooks.closures import around_steps
from tacit.torch_compat import copy_each_, multiply_each_, raise_to_squares_

Undo = Callable[[bool], None]
"""Restores a variance; its argument says whether the step was taken (else it raised)."""


class VarianceGuard(ABC):
    """Replaces Adam's variance during a step, and restores it after the step, also if the step raised.

    A step that a scaler skips does not count.
    """

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        self._names = {id(p): name for name, p in named.items()}
        self._optimizers: Sequence[Optimizer] = [
            each for each in optimizers if any(True for _ in self._parameters(each))
        ]
        self._undo: dict[int, Undo] = {}
        self._handles: list[RemovableHandle] = []

    def _guard(self) -> None:
        self._handles = around_steps(self._optimizers, self._before, self._after)

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
        """The parameters with their present groups, as loading a state replaces groups."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if id(p) in self._names:
                    yield group, p, self._names[id(p)]

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        self._put_back(optimizer, stepped=False)  # the step before has raised
        if not skips(optimizer) and (undo := self._change(optimizer)):
            self._undo[id(optimizer)] = undo

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._put_back(optimizer, stepped=True)

    @torch.no_grad()
    def _put_back(self, optimizer: Optimizer, stepped: bool) -> None:
        if undo := self._undo.pop(id(optimizer), None):
            undo(stepped)

    @abstractmethod
    def _change(self, optimizer: Optimizer) -> Undo | None:
        """Set Adam's variance for this step. Returns how to restore it; None: it was not changed."""

    @abstractmethod
    def _release(self, optimizer: Optimizer) -> None:
        """Set the variance with which Adam goes on alone."""

    @torch.no_grad()
    def restore(self) -> None:
        """Let Adam go on alone; a second call does nothing."""
        guarded = bool(self._handles)
        self.close()
        for each in self._optimizers if guarded else ():
            self._release(each)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for each in self._optimizers:
            self._put_back(each, stepped=False)


@dataclass(slots=True)
class Kept:
    """The variance of a parameter while it is frozen.

    Attributes:
        there: Adam's tensor.
        copy: its values between two steps.
        since: the number of Adam's steps when it moved last.
        steps: the number of Adam's steps now.
    """

    there: Tensor
    copy: Tensor
    since: int
    steps: int

    def stepped(self) -> None:
        """Count a step of Adam."""
        self.steps += 1


class KeepingVariance(VarianceGuard):
    """A guard that freezes the variance from one step to the next."""

    def __init__(self, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> None:
        super().__init__(optimizers, named)
        self._kept: dict[str, Kept] = {}

    @abstractmethod
    def _since(self, there: Tensor, name: str, group: Mapping[str, Any], steps: int) -> int:
        """Convert `there` to the form between steps; returns the Adam steps until the variance moved last."""

    def _keep(
        self, optimizer: Optimizer, p: Tensor, name: str, group: Mapping[str, Any], freeze_step: int | None
    ) -> Kept:
        """The frozen variance of a parameter; recorded again if a checkpoint has brought another."""
        there, kept = variance_of(p, optimizer), self._kept.get(name)
        if there is None:
            raise AttachError(
                f"{name} has its first gradient in step {freeze_step} or later, so that it has no variance "
                "to keep: write a larger freeze_step, or freeze it"
            )
        if kept is None or kept.there is not there:
            steps = int(optimizer.state[p]["step"])
            since = self._since(there, name, group, steps)
            kept = self._kept[name] = Kept(there, there.clone(), since, steps)
        return kept

    def _raise(
        self, found: Sequence[Kept], gradients: list[Tensor], floors: list[float], shares: list[float]
    ) -> Undo | None:
        """Raise frozen variances to floors times g^2, and set Adam's to them times the shares."""
        if not found:
            return None
        there, copies = [kept.there for kept in found], [kept.copy for kept in found]
        raise_to_squares_(copies, there, gradients, floors)
        if any(share != 1.0 for share in shares):
            multiply_each_(there, shares)

        def undo(stepped: bool) -> None:
            copy_each_(there, copies)
            for kept in found if stepped else ():
                kept.stepped()

        return undo


def check_adam(optimizer: Optimizer, group: Mapping[str, Any], wants: str, instead: str) -> None:
    """Raise an `AttachError` where the optimizer has no variance that can be kept in this group."""
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Adam):
        raise AttachError(
            f"{wants}, and {kind} is neither torch.optim.Adam nor AdamW: use one of them; or attach {instead}"
        )
    for option in ("amsgrad", "capturable", "differentiable"):
        if group[option]:
            raise AttachError(
                f"{kind} with {option}=True has no variance that could be kept as it is: leave {option} out"
            )


def skips(optimizer: Optimizer) -> bool:
    """Whether a scaler makes a fused optimizer skip this step."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(float(found))


def variance_of(p: Tensor, optimizer: Optimizer) -> Tensor | None:
    """Adam's tensor, or this rank's shard of it; None before its first step."""
    found = optimizer.state.get(p, {}).get("exp_avg_sq")
    return None if found is None else local(found)


def gradient_of(p: Tensor, optimizer: Optimizer) -> Tensor:
    """This rank's shard of the gradient, without a scaler's factor."""
    g, scale = p.grad, getattr(optimizer, "grad_scale", None)
    assert g is not None
    return local(g) if scale is None else local(g) / scale


def with_decay(g: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The gradient that Adam squares, with an L2 penalty in it; AdamW has none."""
    decay = 0.0 if group.get("decoupled_weight_decay") else group["weight_decay"]
    if not decay:
        return g
    return torch.add(g, local(p.detach()), alpha=-decay if group["maximize"] else decay)
