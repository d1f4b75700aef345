"""Checks that no gradient is added to a mean, which a compressor would treat as a gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from tacit.errors import AttachError
from tacit.model.not_copied import OnlyHere
from tacit.session import Session

_log = logging.getLogger("tacit")


def linear(session: Session) -> bool:
    """Whether a mean plus a gradient may be exchanged: no compressor drops entries or keeps state."""
    return all(each.linear for bucket in session.buckets for each in bucket.chosen)


class AccumulationCheck:
    """Refuses to exchange gradients that were added to means.

    DDP adds the gradients of a second backward to the means of the first, and hands the sum to its hook. A
    compressor that drops entries, votes, or has state would treat the mean as a gradient. Passes under
    `no_sync` are exchanged once, with the last one.

    It checks gradients only if a forward pass follows a backward without a step of the optimizer in between.
    If the optimizer is not known, it checks in every backward whether they have been cleared.

    Args:
        model: its forward passes are watched.
        session: exchanges the gradients.
        named: the parameters.
        scaled: whether a GradScaler may pass over a step.
        unseen: whether the optimizer's steps cannot be observed.
        take_back: undoes an exchange whose gradients were then cleared; None: that is not possible, and one
            warning says so.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        session: Session,
        named: Mapping[str, Tensor],
        scaled: bool,
        unseen: bool = False,
        take_back: Callable[[], None] | None = None,
    ) -> None:
        self._session, self._named = session, named
        self._told, self._unseen, self._take_back = scaled or unseen, unseen, take_back
        self._exchanged = self._looking = self._discarded = False
        self._watching: list[RemovableHandle] = []
        self.note_exchanged: Callable[[], None] = partial(setattr, self, "_exchanged", True)
        """Notes that DDP got means, when the graph of their backward is done."""
        self._handle = model.register_forward_pre_hook(OnlyHere(self._before_forward))

    def stepped(self) -> None:
        """Note a step of the optimizer, which has used the means."""
        self._exchanged = self._looking = self._discarded = False
        self._stop_watching()

    def discarded(self) -> None:
        """Note that a step is discarded, in place of `stepped`; its gradients are to be cleared."""
        self._discarded = True

    def close(self) -> None:
        """Remove the hooks from the model and its parameters."""
        self._handle.remove()
        self._stop_watching()

    def _before_forward(self, *_: object) -> None:
        if not self._exchanged or self._looking or not torch.is_grad_enabled():
            return
        self._looking = True
        # Only when the first gradient is about to be added it is known whether they still hold means.
        for p in () if self._watching else [p for p in self._named.values() if p.requires_grad]:
            handle: RemovableHandle = p.register_hook(self._look)  # type: ignore[no-untyped-call]
            self._watching.append(handle)

    def _look(self, _: Tensor) -> None:
        """Check, once and before the first gradient of a backward is added, that no mean is there."""
        if not self._looking:
            return
        self._looking = False
        if not self._unseen:  # else the next backward is checked too
            self._stop_watching()
        discarded, self._discarded = self._discarded, False
        step = self._session.nonfinite.global_step(self._session.step)
        if any(has_gradient(p) for p in self._named.values()):
            if discarded:
                raise AttachError(
                    f"step {step} was discarded, and its gradients are still there: write "
                    f"optimizer.zero_grad() after session.discard()"
                )
            raise AttachError(
                f"a second backward in step {step}, with no {self._missing} since the first: "
                f"its gradients would be added to means, and {self._session.strategy.name!r} would take the "
                "sum for a gradient. Write `with model.no_sync():` around all backward passes of a step but "
                f"the last{self._or_else}"
            )
        self._exchanged = False
        if discarded:
            return
        if self._take_back is not None:
            self._take_back()
        elif not self._told:
            self._told = True
            _log.warning(
                "the gradients of step %d were exchanged and cleared without optimizer.step: the residuals "
                "of %r hold a part of them, which will be sent all the same. Where a step takes two passes, "
                "as SAM's does, compute the first inside `with model.no_sync():`",
                *(step, self._session.strategy.name),
            )

    @property
    def _missing(self) -> str:
        return "optimizer.zero_grad" if self._unseen else "optimizer.step"

    @property
    def _or_else(self) -> str:
        return "; or give attach the optimizers, where one steps more seldom" if self._unseen else ""

    def _stop_watching(self) -> None:
        for handle in self._watching:
            handle.remove()
        self._watching = []


def has_gradient(p: Tensor) -> bool:
    """Whether the parameter has a gradient that is not zero."""
    return p.grad is not None and bool(p.grad.any())
