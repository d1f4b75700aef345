"""How the answer is applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tacit.contracts.common import State


class Application(NamedTuple):
    """The circumstances in which an answer is applied."""

    peers: int = 1
    lag: int = 0
    """Steps since the start of the round."""
    lr: float = 0.0
    """The learning rate: of these parameters for a merge `by_learning_rate`, else the largest of any."""
    parties: int = 1
    """How many were averaged: the number of replicas; by node, that of nodes."""
    since_equal: int = 0
    """Steps at the start of the round since all replicas were last equal, or have met in a new period."""


class Merge(ABC):
    """How the answer is applied. A frozen dataclass of hyper-parameters; its state is equal on all ranks.

    It is for parameters. Buffers are averaged without it, as a step beyond their mean may not be valid (a
    variance below 0).
    """

    subject: ClassVar[Literal["gradient", "delta", "server"]] = "delta"
    """What an answer is: a mean of gradients, a mean of deltas, or parameters that servers keep."""
    needs_local_delta: ClassVar[Literal["always", "late", "never"]] = "late"
    """For which answers `local_delta` is needed: for all, for late ones, or for none."""
    reads_params: ClassVar[Literal["always", "late", "never"]] = "always"
    """With which answers `apply_` reads `params`; with others it only writes them, unless a replica is alone.
    As `entrywise`, it is declared by the class that defines `apply_`; a class that overrides `apply_`
    declares it again.
    """
    by_learning_rate: ClassVar[bool] = False
    """Whether `apply_` is called for parameters of one learning rate at a time."""
    keeps_unsent: ClassVar[bool] = False
    """Whether `local_delta` is only the part of this rank's delta that was not sent."""
    ends_at_anchor: ClassVar[bool] = False
    """Whether replicas that are to be equal move to the anchor, and set aside what they have not sent.
    Answers may be late: they are applied together with the unsent part and the steps since the round started.
    """
    mixes: ClassVar[bool] = False
    """Whether `mean` may be another one on each rank: the anchor is left alone, and there is no state."""
    entrywise: ClassVar[bool] = False
    """Whether no entry depends on another: `apply_` may get parts of a bucket, in any shape."""

    def __init_subclass__(cls) -> None:
        if "apply_" in vars(cls):
            for said in {"reads_params", "entrywise"} - vars(cls).keys():
                setattr(cls, said, getattr(Merge, said))

    @property
    def meets(self) -> bool:
        """Whether all replicas are equal after an answer that is applied at once."""
        return True

    def init(self, like: Tensor) -> State:
        """The state before the first round: tensors of the shape of `like` (flat)."""
        return {}

    @abstractmethod
    def apply_(
        self,
        params: Tensor,
        anchor: Tensor,
        mean: Tensor,
        local_delta: Tensor | None,
        state: State,
        at: Application,
    ) -> None:
        """Apply an answer to a bucket, in place. All tensors are flat and of its shape, if not `entrywise`.

        They are of the bucket's type, or float32 where that has two bytes, so that changes below the
        precision of a parameter add up in the anchor and in the state.

        Args:
            params: this rank's parameters, or anything if not `reads_params`; overwritten.
            anchor: equal on all ranks; overwritten by the next one, equal on all ranks too.
            mean: the mean delta, `params - anchor` at the start of the round. May be overwritten.
            local_delta: this rank's delta at the start of the round. None if `needs_local_delta` is "never",
                and where the answer comes at once, unless it is "always".
            state: as of `init`; overwritten.
            at: lag, learning rate, and number of replicas.
        """

    def consolidate_(self, anchor: Tensor, mean: Tensor, alone: Tensor | None = None) -> None:
        """Overwrite the anchor by what all replicas become at the end and at `session.sync()`: their mean.

        Args:
            anchor: equal on all ranks.
            mean: the replicas' mean delta.
            alone: the parameters, where there is one replica.
        """
        add_mean_(anchor, mean, alone)


def add_mean_(anchor: Tensor, mean: Tensor, alone: Tensor | None = None) -> None:
    """Move the anchor by the mean delta; if one replica is alone and has moved by it, to its parameters.

    Its delta is rounded, and adding it to the anchor need not lead back.
    """
    if alone is None:
        anchor.add_(mean)
    else:
        anchor.copy_(torch.where(mean == alone - anchor, alone, anchor + mean))
