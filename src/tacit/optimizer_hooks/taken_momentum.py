"""The base of momentum that a compressor applies in place of the optimizer."""

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
    """The momentum of those groups that hold any of the parameters, taken from `take` to `restore`.

    Raises:
        AttachError: no group holds any.
    """

    field: ClassVar[str]
    """The compressor's state field for that momentum."""
    buffer: ClassVar[str]
    """The optimizer's state field for it."""

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
        """The present groups, as loading a state replaces them."""
        return [found for optimizer in self._optimizers for found in self._groups_of(optimizer)]

    def _groups_of(self, optimizer: Optimizer) -> list[tuple[Optimizer, dict[str, Any]]]:
        return [
            (optimizer, group)
            for group in optimizer.param_groups
            if any(id(p) in self._names for p in group["params"])
        ]

    def velocities(self, fields: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Tensor]:
        """The optimizers' present momenta, from which a compressor goes on.

        Args:
            fields: the (parameter, field) of the session's state.

        Returns:
            The momentum for each such field, if the optimizer has one: flat, in memory order.
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
        """Whether the optimizer has applied this momentum to the group so far."""

    @abstractmethod
    def take(self, step: Callable[[], int]) -> None:
        """Take the momentum; `step` returns how many attempts have ended, before a step."""

    @abstractmethod
    def restore(self) -> None:
        """Give the momentum back to the optimizers."""

    @abstractmethod
    def expect(self, names: AbstractSet[str]) -> None:
        """Allocate state for these parameters, for a checkpoint to be loaded into."""

    @abstractmethod
    def saved_state(self) -> dict[str, Tensor]:
        """Further state for a checkpoint, by parameter and in its shape; equal on all ranks."""


def in_memory_order(x: Tensor, like: Tensor) -> Tensor:
    """The entries of `x` in the memory order of `like`, flat, as in DDP's buckets."""
    dims = sorted(range(like.dim()), key=like.stride, reverse=True)
    return x.detach().permute(dims).reshape(-1)


def words(momentum: Momentum | None) -> str:
    """The momentum as errors name it."""
    if momentum is None:
        return "no momentum"
    if momentum.freeze_step is not None:
        return f"Adam's momentum {momentum.factor:g} from step {momentum.freeze_step} on"
    return f"{'Nesterov ' if momentum.nesterov else ''}momentum {momentum.factor:g}"
