"""What a compressor does in the optimizer's place, and what the optimizer then leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from tacit.contracts import Momentum
from tacit.errors import AttachError


class Taken(ABC):
    """The momentum of these optimizers' groups that hold any of the parameters, from `take` to `restore`.

    Raises:
        AttachError: no group holds any.
    """

    field: ClassVar[str]
    """The state field in which the compressor has that momentum."""
    buffer: ClassVar[str]
    """Where the optimizer keeps it."""

    def __init__(
        self, momentum: Momentum, optimizers: Sequence[Optimizer], named: Mapping[str, Tensor]
    ) -> None:
        self.momentum = momentum
        self._optimizers = optimizers
        self._names = {id(p): name for name, p in named.items()}
        if not self._groups:
            raise AttachError(
                "the strategy applies momentum, and the optimizer would apply its own too: give attach the "
                "optimizer, so that its momentum can be set to 0"
            )

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    def _groups(self) -> list[tuple[Optimizer, dict[str, Any]]]:
        """The groups as they are now: loading a state gives an optimizer others."""
        return [found for optimizer in self._optimizers for found in self._groups_of(optimizer)]

    def _groups_of(self, optimizer: Optimizer) -> list[tuple[Optimizer, dict[str, Any]]]:
        return [
            (optimizer, group)
            for group in optimizer.param_groups
            if any(id(p) in self._names for p in group["params"])
        ]

    def velocities(self, fields: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Tensor]:
        """What the optimizers' steps so far have gathered, for a compressor to go on from.

        Args:
            fields: (parameter, field) of the session's state.

        Returns:
            For each field that is a momentum, where the optimizer has one: flat, in the order of memory.
        """
        found = {}
        for optimizer, group in self._groups:
            for p in group["params"] if self._has_momentum(group) else ():
                buffer = optimizer.state.get(p, {}).get(self.buffer)
                if buffer is not None and id(p) in self._names:
                    found[self._names[id(p)]] = in_memory_order(-buffer if group["maximize"] else buffer, p)
        return {
            (name, field): found[name]
            for name, field in fields
            if name in found and field.rpartition(".")[2] == self.field
        }

    @abstractmethod
    def _has_momentum(self, group: Mapping[str, Any]) -> bool:
        """Whether the optimizer has applied momentum to this group so far."""

    @abstractmethod
    def take(self, step: Callable[[], int]) -> None:
        """Take it; `step` tells how many attempts of the optimizer have ended, when one is about to step."""

    @abstractmethod
    def restore(self) -> None:
        """Give it back."""

    @abstractmethod
    def expect(self, names: AbstractSet[str]) -> None:
        """Have room for what a checkpoint holds of these parameters."""

    @abstractmethod
    def kept(self) -> dict[str, Tensor]:
        """What is kept beside the compressor's state, by parameter, shaped as it is; equal on all ranks."""


def in_memory_order(x: Tensor, like: Tensor) -> Tensor:
    """Its entries as those of `like` follow each other in memory, as DDP's buckets have them."""
    dims = sorted(range(like.dim()), key=like.stride, reverse=True)
    return x.detach().permute(dims).reshape(-1)


def words(momentum: Momentum | None) -> str:
    """Of an error message."""
    if momentum is None:
        return "no momentum"
    if momentum.freeze_step is not None:
        return f"Adam's momentum {momentum.factor:g} from step {momentum.freeze_step} on"
    return f"{'Nesterov ' if momentum.nesterov else ''}momentum {momentum.factor:g}"
