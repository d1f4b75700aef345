"""Which parameters are trained. That is fixed when DDP is made, so later changes are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tacit.errors import AttachError
from tacit.model.trained_model import TrainedModel
from tacit.torch_compat import own_parameters

ANEW = "close the session, wrap the model in a new DistributedDataParallel, and attach again"


def trainable(model: TrainedModel) -> dict[str, Tensor]:
    """The trained parameters, by name, without those that DDP is set to ignore."""
    return {
        name: p
        for name, p in model.module.named_parameters()
        if p.requires_grad and name not in model.parameters_to_ignore
    }


def refuse_sparse(model: TrainedModel, algorithm: str) -> None:
    """Refuse embeddings whose gradients are sparse tensors: a bucket cannot hold one.

    Raises:
        AttachError: names the first.
    """
    for name, module in model.module.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.sparse
            and module.weight.requires_grad
        ):
            raise sparse(f"{name}.weight", algorithm)


def sparse(name: str, algorithm: str) -> AttachError:
    """The error for a parameter whose gradient is a sparse tensor."""
    return AttachError(
        f"{name} has sparse gradients, which {algorithm!r} cannot exchange: make the layer with sparse=False "
        "(its gradient is then a dense tensor, which algorithms such as 'topk' shorten), or attach 'ddp', or "
        "one that averages parameters, such as 'localsgd'"
    )


class FrozenCheck:
    """Checks before every step that the same parameters are trained as when the session began.

    DDP never reduces a parameter that was frozen when DDP was made, so replicas would silently diverge in it;
    and the bucket of one that is frozen later never fills, unless DDP searches for unused ones. A replaced
    Parameter is not used any more, and the new one is known neither to DDP nor to the optimizer. If the
    memory order of a parameter's entries changes (`.to(memory_format=...)`), DDP keeps the old order, and
    mixes up the gradient's entries; if its type changes (`.double()`), torch no longer calls DDP.
    """

    def __init__(self, model: TrainedModel) -> None:
        self._model = model
        ddp = isinstance(model, DistributedDataParallel)
        self._anew = ANEW if ddp else "close the session, and attach again"
        ignored = model.parameters_to_ignore
        named = [(name, p) for name, p in model.module.named_parameters() if name not in ignored]
        self._before = [(name, p, p.requires_grad) for name, p in named]
        trained = [(name, p) for name, p in named if p.requires_grad]
        homes = [(name, p, *_home(model.module, name)) for name, p in trained]
        # A scripted module's parameters are in no dict, and cannot be replaced.
        self._homes = [each for each in homes if isinstance(each[2], Mapping)]
        self._types = [(name, p, p.dtype) for name, p in trained]
        self._orders = [(name, p, p.stride()) for name, p in trained if p.dim() > 1]

    def __call__(self, *_: Any) -> None:
        """Check all parameters, before a step.

        Raises:
            AttachError: a parameter was frozen, unfrozen or replaced, or its type or memory order changed;
                the step is not taken.
        """
        for _name, found, home, key in self._homes:
            if home.get(key) is not found:
                self.check_objects()
                break
        for name, p, dtype in self._types:
            if p.dtype != dtype:
                raise AttachError(
                    f"{name} had the type {dtype} when the session began, and has {p.dtype} now: DDP does "
                    f"not average its gradients any more; {self._anew}"
                )
        for name, p, strides in self._orders:
            if p.stride() != strides:
                raise AttachError(
                    f"{name} was laid out in memory by strides {strides} when the session began, and is by "
                    f"{p.stride()} now: DDP keeps to the old order, and its gradients would be wrong. Write "
                    "model.to(memory_format=...) before you wrap the model in DistributedDataParallel"
                )
        for name, p, was in self._before:
            if p.requires_grad and not was:
                raise AttachError(
                    f"{name} was frozen when the session began and is trained now: the session does not know "
                    f"it, and replicas would drift apart; {self._anew}"
                )
            if was and not p.requires_grad and not self._model.find_unused_parameters:
                raise AttachError(
                    f"{name} was trained when the session began and is frozen now: DDP still waits for its "
                    f"gradient; write DistributedDataParallel(..., find_unused_parameters=True), or {ANEW}"
                )

    def check_objects(self) -> None:
        """Refuse Parameters that have been replaced by others.

        Raises:
            AttachError: names the first.
        """
        gone = self._gone()
        if not gone:
            return
        held = {id(p) for p in self._model.module.parameters()}  # it may have moved to another module
        for name, p in gone:
            if id(p) not in held:
                raise AttachError(
                    f"{name} is another Parameter than when the session began, as load_state_dict(..., "
                    "assign=True) makes it: DDP and the optimizer still have the old one, and the model is "
                    "not trained. Load the state again and leave assign=True out, or "
                    f"{self._anew}, with a new optimizer"
                )

    def _gone(self) -> list[tuple[str, Tensor]]:
        """The parameters that are no longer in their modules."""
        return [(name, p) for name, p, home, key in self._homes if home.get(key) is not p]

    def moved(self) -> str:
        """A sentence on parameters that have moved, which DDP may not follow; "" if none has."""
        gone = self._gone()
        if not gone:
            return ""
        return (
            f"{gone[0][0]} is not where it was when the session began, as a parametrization puts it elsewhere"
            f", and DDP may not follow: {self._anew}"
        )


def _home(module: nn.Module, name: str) -> tuple[Mapping[str, Tensor | None], str]:
    """The dict in which the module keeps the parameter, and its key there."""
    path, _, key = name.rpartition(".")
    return own_parameters(module.get_submodule(path)), key


def misfit(names: list[str], what: str) -> AttachError:
    """The error for parameters whose `requires_grad` was changed between DDP's making and attach."""
    return AttachError(
        f"{names[0]} was {what} after the model had been wrapped: DDP keeps to what it found then. Close the "
        "session, wrap the model when all `requires_grad` are set, and attach again"
    )
