"""Steps that wait for the next forward pass: each layer is stepped when its gradients' mean is there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tacit.errors import AttachError
from tacit.gradients.layerwise.hook import LayerwiseHook
from tacit.model.not_copied import OnlyHere
from tacit.model.torch_modes import shielded
from tacit.torch_compat import compiled_module, step_alone, times_written, without_memory

_NOT_EACH = ("LBFGS", "SparseAdam")
_INSTEAD = "attach 'fusion', whose means are there when backward ends"


class AwaitedGradient(Tensor):
    """Takes the place of a gradient whose mean is not there yet; every operation on it is an error."""

    _why: str

    @staticmethod
    def of(p: Tensor, name: str, algorithm: str) -> AwaitedGradient:
        """The placeholder for the gradient of `p`."""
        made: AwaitedGradient = without_memory(AwaitedGradient, p)
        made._why = (
            f"the gradient of {name} is still under way: with {algorithm!r} it comes when the next forward "
            f"pass needs it, so nothing can look at it, clip it, scale it or add to it: take the step, "
            f"accumulate with model.no_sync(), or {_INSTEAD}"
        )
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse it."""
        raise AttachError(next(each._why for each in _flat(args) if isinstance(each, AwaitedGradient)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AwaitedGradient({self._why})"


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for each in args:
        if isinstance(each, list | tuple):
            yield from _flat(each)
        else:
            yield each


def refuse_compiled(model: object, algorithm: str) -> None:
    """Refuse a model that is compiled around DDP, where steps are to be taken layer by layer.

    Raises:
        AttachError: it is, as the hooks of its modules are not called then.
    """
    if compiled_module(model) is not None:
        raise AttachError(
            f"the model is compiled, and {algorithm!r} waits in its modules' forward hooks, which are "
            f"not called there: leave torch.compile out, or {_INSTEAD}"
        )


def refuse_forward_steps(module: nn.Module, optimizers: Sequence[Optimizer], algorithm: str) -> None:
    """Refuse optimizers and modules for which steps cannot be taken layer by layer.

    Raises:
        AttachError: there is no optimizer, or one that steps more than a parameter at a time; or the model
            has compiled or scripted modules, whose parts call no hooks.
    """
    if not optimizers:
        raise AttachError(
            f"{algorithm!r} takes the optimizer's steps layer by layer: give attach the optimizer"
        )
    for optimizer in optimizers:
        home = stepping(optimizer)
        if not home.__module__.startswith("torch.optim") or home.__name__ in _NOT_EACH:
            raise AttachError(
                f"{type(optimizer).__name__} is not known to step each parameter by itself, as {algorithm!r} "
                f"needs it, which steps layer by layer: use one of torch.optim, such as AdamW, or {_INSTEAD}"
            )
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule) or compiled_module(each) is not None:
            how = "scripted" if isinstance(each, torch.jit.ScriptModule) else "compiled"
            raise AttachError(
                f"{name or 'the model'} is {how}, and {algorithm!r} waits in its modules' forward hooks, "
                f"which are not called there: leave that out, or {_INSTEAD}"
            )


def stepping(optimizer: Optimizer) -> type:
    """The class that defines an optimizer's `step`."""
    return next(each for each in type(optimizer).__mro__ if "step" in vars(each))


class Uses(TorchFunctionMode):
    """A mode that calls a function with the name of each parameter that is about to be used."""

    def __init__(self, names: Mapping[int, str], used: Callable[[str], None]) -> None:
        super().__init__()
        self._names, self._used = names, used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report the parameters among the arguments."""
        for each in _flat([*args, *(kwargs or {}).values()]):
            if id(each) in self._names:
                self._used(self._names[id(each)])
        return func(*args, **(kwargs or {}))


@dataclass
class _Due:
    """A step of one optimizer that is still to be taken for some parameters.

    Attributes:
        options: the options of each of its groups when `step` was called.
        versions: parameter -> its version counter and its address at that time, to detect later writes.
    """

    options: list[dict[str, Any]]
    versions: dict[str, tuple[int, int]]


class ForwardSteps:
    """Puts an optimizer's step off, parameter by parameter, until the next forward pass needs the parameter.

    At first it watches forward passes, to learn in which modules parameters are used, and steps are taken at
    once; gradients are hidden then, too. From `begin` on steps are put off.

    Args:
        hook: has the means.
        module: the model.
        named: its parameters.
        optimizers: their steps are put off.
        algorithm: its name, for errors.

    Attributes:
        needed: parameter -> its position in a forward pass; empty until one has been seen.
        at_work: whether steps are put off.
    """

    def __init__(
        self,
        hook: LayerwiseHook,
        module: nn.Module,
        named: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
        algorithm: str,
    ) -> None:
        refuse_forward_steps(module, optimizers, algorithm)
        self._hook, self._module, self._named = hook, module, dict(named)
        self._optimizers, self._algorithm = optimizers, algorithm
        self._names = {id(p): name for name, p in named.items()}
        self._inside: list[nn.Module] = []
        self._uses: Uses | None = None
        self._used_in: dict[str, nn.Module] = {}
        self._stepping = False
        self._needs: dict[nn.Module, list[str]] = {}
        self._awaited: set[str] = set()
        self._given: dict[str, Tensor] = {}
        self._due: dict[Optimizer, _Due] = {}
        self.needed: dict[str, int] = {}
        self.at_work = False
        self._handles: list[RemovableHandle] = []
        self._watch()
        hook.keep_means(self.complete, self._ended)

    # ---- which module needs what ----------------------------------------------------------------------

    def _watch(self) -> None:
        for each in self._module.modules():
            self._handles.append(each.register_forward_pre_hook(OnlyHere(self._enter)))
            self._handles.append(each.register_forward_hook(OnlyHere(self._leave), always_call=True))

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module is self._module:
            self._inside.clear()
            self._used_in = {}
            self._begin_uses(self._note)
        self._inside.append(module)

    def _note(self, name: str) -> None:
        if self._inside:
            self._used_in.setdefault(name, self._inside[-1])

    def _begin_uses(self, used: Callable[[str], None]) -> None:
        self._end_uses()
        self._uses = Uses(self._names, used)
        self._uses.__enter__()  # type: ignore[no-untyped-call]

    def _end_uses(self) -> None:
        uses, self._uses = self._uses, None
        if uses is not None:
            uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if self._inside:
            self._inside.pop()
        if module is self._module and self._uses is not None:
            self._end_uses()
            self.needed = {name: turn for turn, name in enumerate(self._used_in)}

    def begin(self) -> None:
        """Put steps off from now on. To be called after a forward pass of the model."""
        self.at_work = True
        self._hook.log.order_by(self.needed)
        for handle in self._handles:
            handle.remove()
        needs: dict[nn.Module, dict[str, None]] = {}
        for each in self._module.modules():
            own = [self._names[id(p)] for p in each.parameters(recurse=False) if id(p) in self._names]
            if own:
                needs.setdefault(each, {}).update(dict.fromkeys(own))
        for name in self._named:
            # Parameters that were never seen in use are waited for at the start of forward.
            needs.setdefault(self._used_in.get(name, self._module), {})[name] = None
        self._needs = {module: [*names] for module, names in needs.items()}
        self._handles = [self._module.register_forward_pre_hook(OnlyHere(self._before_forward))]
        hook = OnlyHere(self._before_module)
        self._handles += [each.register_forward_pre_hook(hook) for each in self._needs]
        ended = OnlyHere(lambda *_: self._end_uses())
        self._handles.append(self._module.register_forward_hook(ended, always_call=True))
        self._handles.append(self._module.register_forward_hook(OnlyHere(self._after_forward)))
        saving: Any = self._module.register_state_dict_pre_hook
        self._handles.append(saving(OnlyHere(self._before_saving)))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_state_dict_pre_hook(self._before_saving))

    def remove(self) -> None:
        """Take the hooks away."""
        self._end_uses()
        for handle in self._handles:
            handle.remove()
        for name in self._awaited:
            self._named[name].grad = self._given.get(name)
        self._awaited.clear()

    # ---- backward and step ----------------------------------------------------------------------------

    def _ended(self) -> None:
        """Put a placeholder, which cannot be read, in place of each gradient, as backward is over."""
        if not self.at_work:
            self._hook.give_means()
            self._given = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        for name, p in self._named.items():
            p.grad = AwaitedGradient.of(p, name, self._algorithm)
        self._awaited = {*self._named}

    def before_step(self, optimizer: Optimizer) -> None:
        """Put off the step of parameters whose means are awaited; before `begin`, put the gradients back.

        Raises:
            AttachError: the step before is still put off, and there was no backward since.
        """
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        mine = [self._names[each] for each in held if self._names.get(each) in self._awaited]
        if not self.at_work:
            self._hook.check()  # the step is taken at once
        if not mine:
            if optimizer in self._due:
                raise AttachError(
                    f"a second optimizer.step with no backward since the first: {self._algorithm!r} still "
                    "has to take the first, when the next forward pass comes. Take one step for each backward"
                )
            return
        for name in mine:
            self._named[name].grad = self._given.pop(name, None)
        self._awaited.difference_update(mine)
        if not self.at_work:
            return
        options = [_copied(group) for group in optimizer.param_groups]
        self._due[optimizer] = _Due(options, {name: _version(self._named[name]) for name in mine})

    # ---- forward --------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if self._due:  # this forward may use a parameter in another module than the one that was watched
            self._begin_uses(lambda name: self._step([name]))

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self._due:
            self._step(self._needs[module])

    def _after_forward(self, *_: Any) -> None:
        self.complete()

    def _before_saving(self, *_: Any) -> None:
        self.complete()
        self._hook.check()

    def complete(self) -> None:
        """Take all steps that are put off."""
        self._step([name for due in self._due.values() for name in due.versions])
        self._hook.settle()

    @shielded
    def _step(self, names: Collection[str]) -> None:
        """Wait for these parameters' means, and step them and all others whose means are complete."""
        wanted = [name for name in names if any(name in due.versions for due in self._due.values())]
        if not wanted or self._stepping:
            return
        self._stepping = True  # steps use parameters, too
        try:
            self._hook.wait_for(wanted)
            for optimizer, due in [*self._due.items()]:
                here = [name for name in due.versions if self._hook.is_here(name)]
                if here:
                    self._step_some(optimizer, due, here)
                if not due.versions:
                    del self._due[optimizer]
        finally:
            self._stepping = False

    def _step_some(self, optimizer: Optimizer, due: _Due, names: Collection[str]) -> None:
        for name in names:
            p = self._named[name]
            if _version(p) != due.versions[name]:
                raise AttachError(
                    f"{name} was changed after optimizer.step, and its step is still to be taken: with "
                    f"{self._algorithm!r} that is when the next forward pass needs it. Call session.flush() "
                    f"before you change parameters, or {_INSTEAD}"
                )
            p.grad = self._hook.mean(name)
        some = {id(self._named[name]) for name in names}
        with torch.inference_mode(False), torch.no_grad(), _as_then(optimizer, due.options, some):
            step_alone(optimizer)
        for name in names:
            self._named[name].grad = None
            del due.versions[name]


def _version(p: Tensor) -> tuple[int, int]:
    return times_written(p), p.data_ptr()


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a group's present options."""
    given = {key: value for key, value in group.items() if key != "params"}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}


@contextmanager
def _as_then(
    optimizer: Optimizer, options: Sequence[Mapping[str, Any]], some: Collection[int]
) -> Iterator[None]:
    """A block in which the optimizer has these options, and only some of its parameters."""
    groups = optimizer.param_groups
    now = [dict(group) for group in groups]
    try:
        for group, then in zip(groups, options, strict=False):
            group.update(then, params=[p for p in group["params"] if id(p) in some])
        for group in groups[len(options) :]:
            group["params"] = []
        yield
    finally:
        for group, before in zip(groups, now, strict=True):
            group.update(before)
