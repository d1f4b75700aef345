"""What a profile keeps of the user's optimizers: enough to check a strategy against them as `attach` does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tacit.described import Whole


@dataclass(frozen=True)
class OptimizerFacts:
    """A group of parameters, and the optimizer that steps it.

    Attributes:
        optimizer: the optimizer's number.
        kind: the class of torch.optim that it is of, such as "AdamW".
        own_step: whether its class has a step of its own.
        parameters: the names of those that are exchanged.
        options: of the group: its numbers, such as "momentum".
    """

    optimizer: Whole
    kind: str
    own_step: bool
    parameters: tuple[str, ...]
    options: Mapping[str, bool | float | tuple[float, ...] | None] = field(default_factory=dict)


def facts_of(optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]) -> tuple[OptimizerFacts, ...]:
    """The facts about these optimizers, group by group; `named`: the parameters that are exchanged."""
    names = {id(p): name for name, p in named.items()}
    found = []
    for number, optimizer in enumerate(optimizers):
        known = next(each for each in type(optimizer).__mro__ if each.__module__.startswith("torch.optim"))
        own = type(optimizer).step is not getattr(known, "step", None)
        for group in optimizer.param_groups:
            mine = tuple(names[id(p)] for p in group["params"] if id(p) in names)
            options = {
                name: _plain(value) for name, value in group.items() if name != "params" and _is_plain(value)
            }
            if mine:
                found.append(OptimizerFacts(number, known.__name__, own, mine, options))
    return tuple(found)


def _plain(value: Any) -> bool | float | tuple[float, ...] | None:
    """The value, if it is a number or several, or none."""
    if isinstance(value, tuple | list):
        return tuple(map(float, value))
    return value if value is None or isinstance(value, bool) else float(value)


def _is_plain(value: object) -> bool:
    several = value if isinstance(value, tuple | list) else (value,)
    return all(each is None or isinstance(each, bool | int | float | Tensor) for each in several)


def made_again(facts: Sequence[OptimizerFacts], named: Mapping[str, Tensor]) -> list[Optimizer]:
    """Optimizers of the same classes and options, for tensors that stand for parameters."""
    found: list[Optimizer] = []
    for number in dict.fromkeys(each.optimizer for each in facts):
        groups = [each for each in facts if each.optimizer == number]
        members: dict[str, object] = {"__init__": _begin}
        if groups[0].own_step:
            members["step"] = _never
        kind = type(groups[0].kind, (getattr(torch.optim, groups[0].kind),), members)
        found.append(kind([([named[name] for name in group.parameters], group.options) for group in groups]))
    return found


def _begin(self: Optimizer, groups: Sequence[tuple[list[Tensor], Mapping[str, Any]]]) -> None:
    """Have these groups; torch's own `__init__` would load its compiler."""
    self.state = defaultdict(dict)
    self.param_groups = [{"params": parameters, **options} for parameters, options in groups]


def _never(self: Optimizer, closure: object = None) -> None:
    raise AssertionError("an optimizer that stands in a profile does not step")
