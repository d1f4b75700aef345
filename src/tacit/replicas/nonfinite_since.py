"""In which step and parameter NaN began in a replica that moves on its own: only rounds look for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tacit.kernels.dispatch import on_host
from tacit.model.trained_model import local
from tacit.session.health.nonfinite_origin import Origin


class NonfiniteSince:
    """Looks at one small gradient before every step, and at everything once that is not finite.

    A parameter that is not finite makes the next output so, and with it all gradients. They are looked at
    before the optimizer takes them, so that what is broken then is what broke in the step before, and not
    yet all that comes of it. Where no parameter is, it began in this step, in these gradients.

    Args:
        named: the parameters, in the model's order.
        step: reads how many steps have been taken.
    """

    def __init__(self, named: Mapping[str, Tensor], step: Callable[[], int]) -> None:
        self._named, self._step = named, step
        sizes = {name: local(p).numel() for name, p in named.items()}
        self._probe = min((p for name, p in named.items() if sizes[name]), key=Tensor.numel, default=None)
        self._found: tuple[int, str, bool] | None = None
        self._since: Tensor | None = None
        """On a device, the first step with such a gradient, or -1; read when somebody asks."""

    def __call__(self, *_: Any) -> None:
        """To be called before every step."""
        grad = None if self._probe is None or self._probe.grad is None else local(self._probe.grad)
        if grad is not None and not on_host(grad):
            self._note(grad)
        elif self._found is None and grad is not None and not _finite(grad):
            self._found = self._look()

    def origin(self, step: int) -> Origin | None:
        """Where it began, as seen from this step; None where nothing has been found."""
        if self._found is None and self._since is not None and int(self._since) >= 0:
            seen = self._look()
            self._found = seen and (int(self._since), seen[1], True)
        if self._found is None:
            return None
        first, name, several = self._found
        return Origin(name, max(0, step - first), several)

    def _note(self, grad: Tensor) -> None:
        """Note it on the gradient's device, without waiting for it."""
        if self._since is None:
            self._since = torch.full((), -1, dtype=torch.int64, device=grad.device)
        broken = torch.isfinite(grad.coalesce().values() if grad.is_sparse else grad).all().logical_not()
        self._since = torch.where(broken & (self._since < 0), self._step(), self._since)

    def _look(self) -> tuple[int, str, bool] | None:
        step = self._step()
        grads = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        for first, tensors in ((step - 1, self._named), (step, grads)):
            names = [name for name, tensor in tensors.items() if not _finite(tensor)]
            if names:
                return first, names[0], len(names) > 1
        return None


def _finite(x: Tensor) -> bool:
    x = local(x.detach())
    values = x.coalesce().values() if x.is_sparse else x
    return bool(torch.isfinite(values).all())
