"""Decides which optimizer steps count as a step of the session, and refuses others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tacit.errors import AttachError, TacitError
from tacit.gradients.accumulation_checks import has_gradient
from tacit.gradients.ddp_hook import SyncedBackwards
from tacit.model.not_copied import OnlyHere
from tacit.optimizer_hooks.closures import closure_of
from tacit.optimizer_hooks.global_hooks import before_steps

Given = ParamSpec("Given")
T = TypeVar("T")


class StepCounting:
    """Counts a step when every optimizer has stepped, or when one is about to step once more.

    So they may step in any order, and one of them less often than another. A step without a backward pass
    before it that changes nothing does not count: tools use it to make an optimizer create its state.

    Args:
        optimizers: the session's optimizers.
        named: the parameters that no other optimizer may step.
        backwards: counts the backward passes; None: they are not counted.
        name: the strategy's name.
        begin: called before the first optimizer steps.
        count: called when a step has ended.

    Attributes:
        refused: the error that prevented the last step.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        backwards: SyncedBackwards | None,
        name: str,
        begin: Callable[[], None],
        count: Callable[[], None],
    ) -> None:
        self._optimizers, self._backwards = optimizers, backwards
        self._name, self._begin, self._count = name, self.noting(begin), count
        self.refused: TacitError | None = None
        self._names = {id(p): name for name, p in named.items()}
        self._on_gpu = any(p.is_cuda for p in named.values())
        self._stepped: set[int] = set()
        self._begun = {id(each): 0 for each in optimizers}
        self._none: dict[int, bool] = {}
        self._stepping: Optimizer | None = None
        self._others: WeakSet[Optimizer] = WeakSet()
        self._alone_behind = -1
        self._moved: Callable[[], str] = lambda: ""
        self._handles: list[Any] = [before_steps(self.noting(self._refuse_others))]
        for each in optimizers:
            self._handles += [
                each.register_step_pre_hook(self._before),
                each.register_step_post_hook(self._after),
            ]

    def complete(self) -> None:
        """Count a step that only some of the optimizers have taken."""
        if self._stepped:
            self._stepped.clear()
            self._count()
            self.refused = None

    def noting(self, call: Callable[Given, T]) -> Callable[Given, T]:
        """Wrap a function so that its error is stored in `refused`."""

        def noted(*args: Given.args, **kwargs: Given.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except TacitError as error:
                self.refuse(error)
                raise

        return noted

    def refuse(self, error: TacitError) -> None:
        """Note the error for which a step is not taken."""
        self.refused = error

    @property
    def is_half_taken(self) -> bool:
        """Whether some of the optimizers have stepped since the last backward, and others may still."""
        if self._backwards is None:
            return bool(self._stepped)
        return any(self._begun[each] == self._backwards.begun for each in self._stepped)

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    # ---- around a step ----------------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise AttachError(
                f"{type(optimizer).__name__}.step is called while a CUDA graph is being captured, and "
                f"replays run no Python, so {self._name!r} would not see their steps: capture forward and "
                "backward alone, and call step after each replay"
            )
        if id(optimizer) in self._stepped:
            self.complete()
        computed = closure_of(args, kwargs) is None  # else its backward follows
        none = self._none[id(optimizer)] = computed and self._is_none(optimizer)
        if not self._stepped and not none:
            self._begin()
        self._stepping = optimizer

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stepping = None
        none = self._none.pop(id(optimizer), False)
        if none or (closure_of(args, kwargs) is not None and self._is_none(optimizer)):
            return
        if self._backwards is not None:
            self._begun[id(optimizer)] = self._backwards.begun
            self._backwards.stepped()
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._begun):
            self.complete()

    def _is_none(self, optimizer: Optimizer) -> bool:
        """Whether the step has changed nothing: torch's tools create state by zero rates or gradients."""
        if self._backwards is not None and self._backwards.begun != self._begun[id(optimizer)]:
            return False
        optimizer = getattr(optimizer, "whole_optimizer", optimizer)  # where this is a shard's
        still = all(_zero(group.get("lr")) for group in optimizer.param_groups)
        if self._backwards is None:
            return still and not _has_gradients(optimizer)
        return still or not _has_gradients(optimizer)

    def _refuse_others(self, optimizer: Optimizer) -> None:
        """Refuse a step of the parameters by an unknown optimizer that is not part of a known one's step."""
        if self._stepping is not None or id(optimizer) in self._begun or optimizer in self._others:
            return
        if any(id(each) in self._begun for each in _inside(optimizer)):
            return  # a container: its optimizers are seen when they step
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        name = next((self._names[each] for each in held if each in self._names), None)
        if name is None:
            self._others.add(optimizer)
            return
        given = ", ".join(dict.fromkeys(type(each).__name__ for each in self._optimizers))
        raise AttachError(
            f"{type(optimizer).__name__} steps {name}, and {self._name!r} was attached with {given}, so it "
            "would not see the step: give attach each optimizer whose step() the script calls (of one that "
            "calls another's, the one inside where its own step() is not called), as a list where there are "
            "several. Where a training goes on with a new one, close the session and attach again"
        )

    # ---- gradients that were not exchanged --------------------------------------------------------------

    def watch_forward(self, model: DistributedDataParallel, moved: Callable[[], str]) -> None:
        """Note forward passes under `no_sync`, whose gradients stay on this rank.

        `moved`: returns what DDP does not follow and what to do, for errors about gradients that were not
            exchanged.
        """
        self._moved, backwards = moved, self._backwards
        assert backwards is not None

        def before(*_: Any) -> None:
            if not model.require_backward_grad_sync and torch.is_grad_enabled():
                self._alone_behind = backwards.begun

        self._handles.append(model.register_forward_pre_hook(OnlyHere(before)))

    def refuse_own_gradients(self, optimizer: Optimizer) -> None:
        """Check, before a step, that its gradients were exchanged.

        Raises:
            AttachError: some have not been exchanged.
        """
        assert self._backwards is not None
        never = self._backwards.begun == self._begun[id(optimizer)]
        # One that synchronises exchanges what was computed alone before it, too.
        alone = self._backwards.begun == self._alone_behind
        if (never or alone) and _has_gradients(optimizer):
            why = self._moved() or (
                "compute the loss by calling the DistributedDataParallel, and not model.module, and leave "
                "model.no_sync() out of the last backward of a step, which then exchanges those before it too"
            )
            raise AttachError(
                f"a step is about to be taken by gradients that {self._name!r} has not exchanged, as DDP did "
                f"not call its hook in the last backward, and replicas would drift apart: {why}"
            )


def _inside(optimizer: Optimizer) -> list[object]:
    """The attributes of an optimizer, and the items of its lists."""
    held = [*vars(optimizer).values()]
    return held + [each for some in held if isinstance(some, list | tuple) for each in some]


def _zero(lr: object) -> bool:
    return isinstance(lr, int | float | Tensor) and not bool(lr)


def _has_gradients(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a gradient that is not zero."""
    return any(has_gradient(p) for group in optimizer.param_groups for p in group["params"])
