"""Finds the step and parameter in which NaN began in a replica that steps alone, between two rounds or behind
the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tacit.exchange.finite_checks import finite
from tacit.exchange.joined_requests import gather
from tacit.kernels.dispatch import on_host
from tacit.model.trained_model import local
from tacit.session import Session
from tacit.session.health.nonfinite_origin import Origin


class NonfiniteSince:
    """Checks one small gradient before every step, and all gradients and parameters once that is not finite.

    A parameter with NaN makes the next output NaN, and so all gradients. They are checked before the
    optimizer takes them, so that only the parameters that broke in the step before have NaN. If no parameter
    has, the NaN began in the gradients of this step.

    Args:
        named: the parameters, in the model's order.
        step: returns the number of steps taken.
    """

    def __init__(self, named: Mapping[str, Tensor], step: Callable[[], int]) -> None:
        self._named, self._step = named, step
        sizes = {name: local(p).numel() for name, p in named.items()}
        self._probe = min((p for name, p in named.items() if sizes[name]), key=Tensor.numel, default=None)
        self._sharded = self._probe is not None and local(self._probe) is not self._probe
        self._found: tuple[int, str, bool] | None = None
        self._since: Tensor | None = None
        """On a device: the first step with such a gradient, or -1; read when `origin` is called."""

    def __call__(self, *_: Any) -> None:
        """Check the gradients, before every step."""
        if self._probe is None or (grad := self._probe.grad) is None:
            return
        if not on_host(grad):
            self._note(local(grad))
        elif self._found is None and not _finite(local(grad) if self._sharded else grad):
            self._found = self._look()

    def origin(self, step: int) -> Origin | None:
        """The parameter and the age of the first NaN, counted from this step; None: none was found."""
        if self._found is None and self._since is not None and int(self._since) >= 0:
            seen = self._look()
            self._found = seen and (int(self._since), seen[1], True)
        if self._found is None:
            return None
        first, name, several = self._found
        return Origin(name, max(0, step - first), several)

    def _note(self, grad: Tensor) -> None:
        """Record the step on the gradient's device, without waiting for it."""
        if self._since is None:
            self._since = torch.full((), -1, dtype=torch.int64, device=grad.device)
        broken = torch.isfinite(grad.coalesce().values() if grad.is_sparse else grad).all().logical_not()
        self._since = torch.where(broken & (self._since < 0), self._step(), self._since)

    def _look(self) -> tuple[int, str, bool] | None:
        step = self._step()
        grads = {name: p.grad for name, p in self._named.items() if p.grad is not None}
        for first, tensors in ((step - 1, self._named), (step, grads)):
            names = [name for name, tensor in tensors.items() if not _finite(local(tensor))]
            if names:
                return first, names[0], len(names) > 1
        return None


def _finite(x: Tensor) -> bool:
    x = x.detach()
    values = x.coalesce().values() if x.is_sparse else x
    return bool(torch.isfinite(values).all())


def refuse_nonfinite(session: Session, means: Sequence[Tensor], read: Callable[[int, Tensor], None]) -> None:
    """Raise an error on all ranks, if the replicas' mean of a bucket is not finite.

    `read`: overwrites a tensor with this replica's parameters of a bucket.

    Raises:
        NonFinite: names the ranks and their first such parameter.
    """
    for i, (bucket, mean) in enumerate(zip(session.buckets, means, strict=True)):
        if finite(mean):
            continue
        step, mine, nonfinite = session.step, torch.empty_like(mean), session.nonfinite
        read(i, mine)
        broken = [each.name for each in bucket.slices if not finite(mine[each.start : each.stop])]
        code = torch.tensor([nonfinite.parameter_code(step, broken[0]) if broken else 0])
        codes = session.ask(partial(gather, code, session.strategy.topology.scope), "nonfinite")
        raise nonfinite.error_of([int(each) for each in codes], step)
