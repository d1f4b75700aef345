"""Which parameters are trained: fixed when DDP is made, so a later change of `requires_grad` is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tacit.errors import AttachError

ANEW = "close the session, wrap the model in a new DistributedDataParallel, and attach again"


def trainable(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters that are trained, by name, but for those that DDP was told to ignore."""
    return {
        name: p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    }


class StillTrained:
    """Looks before every step whether the same parameters are trained as when the session began.

    DDP never reduces a parameter that was frozen when it was made, so replicas would drift apart in it
    without a word; and the bucket of one that is frozen later never fills, unless DDP looks for unused ones.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        ignored = model.parameters_to_ignore
        named = model.module.named_parameters()
        self._before = [(name, p, p.requires_grad) for name, p in named if name not in ignored]

    def __call__(self, *_: Any) -> None:
        """To be called before a step.

        Raises:
            AttachError: a parameter is trained that was not, or the other way round; the step is not taken.
        """
        for name, p, was in self._before:
            if p.requires_grad and not was:
                raise AttachError(
                    f"{name} was frozen when the session began and is trained now: DDP does not reduce its "
                    f"gradient, and replicas would drift apart; {ANEW}"
                )
            if was and not p.requires_grad and not self._model.find_unused_parameters:
                raise AttachError(
                    f"{name} was trained when the session began and is frozen now: DDP still waits for its "
                    f"gradient; write DistributedDataParallel(..., find_unused_parameters=True), or {ANEW}"
                )


def misfit(names: list[str], what: str) -> AttachError:
    """The error for parameters whose `requires_grad` was changed between DDP's making and attach."""
    return AttachError(
        f"{names[0]} was {what} after the model had been wrapped: DDP keeps to what it found then. Close the "
        "session, wrap the model when all `requires_grad` are set, and attach again"
    )
