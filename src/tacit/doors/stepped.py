"""The door where a server steps: gradients leave in place of `optimizer.step`, and parameters come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tacit.contracts import Piece
from tacit.errors import AttachError
from tacit.session import Session

_TOLD: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum", "dampening", "weight_decay", "nesterov"),
    Adam: ("betas", "eps", "weight_decay"),
    AdamW: ("betas", "eps", "weight_decay"),
}
"""Which hyper-parameters a server is told; the learning rate goes with each push."""


def described(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """The worker's optimizer in plain values, for a server to step as it would.

    Raises:
        AttachError: a server has none like it.
    """
    if len(optimizers) != 1 or type(optimizers[0]) not in _TOLD:
        kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
        raise AttachError(
            f"with optimizer='server' the server steps as the worker's optimizer would, and {kinds} is no "
            "torch.optim.SGD, Adam or AdamW: give attach one of these, or write optimizer='worker'"
        )
    (optimizer,) = optimizers
    groups = [
        {key: group[key] for key in ("lr", *_TOLD[type(optimizer)])} for group in optimizer.param_groups
    ]
    if any(group != groups[0] for group in groups):
        raise AttachError(
            "with optimizer='server' all parameters are stepped alike, and the optimizer's groups differ: "
            "make them equal, or write optimizer='worker'"
        )
    for flag in ("maximize", "amsgrad"):
        if any(group.get(flag) for group in optimizer.param_groups):
            raise AttachError(f"a server has no {flag}=True: leave it out, or write optimizer='worker'")
    return {"kind": type(optimizer).__name__, **{k: v for k, v in groups[0].items() if k != "lr"}}


class SteppedDoor:
    """Takes the gradients from the optimizer, so that its step does nothing, and pushes them.

    Args:
        session: exchanges them.
        named: the parameters.
        back: how those of a lot come back.
    """

    def __init__(
        self, session: Session, named: Mapping[str, Tensor], back: Callable[[Tensor], Piece]
    ) -> None:
        self._session, self._named = session, named
        self._flat = [torch.zeros_like(lot.like(lot.device)) for lot in session.lots]
        self._have = [torch.zeros_like(flat) for flat in self._flat]
        self._whole = all(back(flat).codec is None for flat in self._flat)
        self._taken: dict[str, Tensor] = {}
        for i, have in enumerate(self._have):
            for slot in session.lots[i].slots:
                have[slot.start : slot.stop] = named[slot.name].detach().view(-1)

    def before_step(self, *_: Any) -> None:
        """To be called before `optimizer.step`, which finds no gradients."""
        self._session.raise_failure()
        for name, p in self._named.items():
            if p.grad is not None:
                self._taken[name] = p.grad
                p.grad = None

    def after_step(self) -> None:
        """To be called after it: push, wait for the parameters, and give the gradients back.

        Raises:
            RoundError: a server or a worker is gone, or a gradient is not finite; nothing was applied then.
        """
        session, taken = self._session, self._taken
        self._taken = {}
        try:
            flight = session.begin()
            for i, flat in enumerate(self._flat):
                for slot in session.lots[i].slots:
                    gradient = taken.get(slot.name)
                    flat[slot.start : slot.stop] = 0.0 if gradient is None else gradient.view(-1)
                session.submit(i, flat, lambda: None)
            session.wait(flight)
            for i, flat in enumerate(self._flat):
                self._write(i, flat, self._whole)
        finally:
            for name, gradient in taken.items():
                self._named[name].grad = gradient
        session.step += 1

    def sync(self) -> None:
        """Wait until all workers have pushed what they have, and take what came of it."""
        self._session.flush()
        for i, flat in enumerate(self._flat):
            if self._session.agree(i, flat):
                self._write(i, flat, whole=True)

    def enter(self, bring: Callable[[str, Tensor], Tensor]) -> None:
        """Go on from what a server has; `bring` tells it of a lot, and says what it has of it."""
        for i, lot in enumerate(self._session.lots):
            self._write(i, bring(lot.name, self._have[i]), whole=True)

    def _write(self, i: int, answer: Tensor, whole: bool) -> None:
        have = self._have[i]
        if whole:
            have.copy_(answer)
        else:
            have.add_(answer)
        with torch.no_grad():
            for slot in self._session.lots[i].slots:
                p = self._named[slot.name]
                p.copy_(have[slot.start : slot.stop].view_as(p))
