"""The optimizers' state where replicas step alone."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import ASGD, LBFGS, Adafactor, NAdam, Optimizer, Rprop

from tacit.errors import AttachError
from tacit.exchange.joined_requests import average_, gather
from tacit.model.trained_model import local
from tacit.optimizer_hooks.frozen_adam import least_variance
from tacit.optimizer_hooks.kept_variance import KeptVariance
from tacit.optimizer_hooks.scaled_variance import ScaledVariance
from tacit.replicas.anchor_comparison import alike
from tacit.session import Session

_log = logging.getLogger("tacit")

_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf"})
"""The fields of torch's optimizers that hold second moments."""
_NOT_FROM_ZERO = (ASGD, LBFGS, Adafactor, NAdam, Rprop)


class OptimizerState:
    """The optimizers' state of the parameters: momentum, Adam's moments.

    The strategy decides whether it is averaged or reset when an answer is applied, or in which other steps.

    Args:
        session: its replicas exchange the state.
        optimizers: step the parameters.
        named: the parameters.
        near: the ranks with the other shards of this replica; None: it is not sharded.

    Attributes:
        variance: makes Adam use a variance of mean gradients; None: each replica uses its own.
        has_periods: whether anything is exchanged in steps of its own, by `before` and `after`.
        in_rounds: whether it is averaged or reset when an answer is applied, by `completed`.

    Raises:
        AttachError: an optimizer's state cannot start from zero.
    """

    variance: ScaledVariance | KeptVariance | None = None
    _scaled: ScaledVariance | None = None
    _kept: KeptVariance | None = None

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[Optimizer],
        named: Mapping[str, Tensor],
        near: dist.ProcessGroup | None = None,
    ) -> None:
        self._session, self._optimizers, self._named = session, optimizers, named
        self._kind = session.strategy.momentum
        self._periods = None if isinstance(self._kind, str) else self._kind
        self._warned = False
        self._flat: dict[torch.dtype, Tensor] = {}
        if self._kind == "reset":
            _check_resettable(optimizers)
        if self._kind not in ("local", "reset"):
            for bucket in session.buckets:
                self._room(bucket.dtype, bucket.numel)
        if session.strategy.variance == "scaled":
            scaled = ScaledVariance(session, optimizers, named, near)
            self._scaled = self.variance = scaled if scaled.squares else None
        if (renewals := session.strategy.renewals) is not None:
            replicas = len(session.ranks)
            self._kept = KeptVariance(renewals, optimizers, named, replicas, lambda: session.step)
            self.variance = self._kept
        self.has_periods = self._periods is not None or self._scaled is not None
        self.in_rounds = self._kind in ("averaged", "reset")

    def count_by(self, step: Callable[[], int]) -> None:
        """See `KeptVariance.count_by`."""
        if self._kept is not None:
            self._kept.count_by(step)

    def completed(self, names: Collection[str], alone: bool = False) -> None:
        """Average or reset the state of these parameters, after a round's answer has been applied to them.

        `alone`: whether the others do not do so now; then it is not averaged.
        """
        if self._kind == "averaged":
            if not alone:
                self._average(names)
        elif self._kind == "reset":
            for state in self._states(names).values():
                _zero(state)

    def due(self, step: int) -> bool:
        """Whether a period of the state ends with this step, counted from 0."""
        return any(self._ending(step)) or (self._scaled is not None and self._scaled.due(step))

    def before(self, step: int) -> None:
        """Exchange what is due after this step before a round starts. A collective call if something is."""
        if self._scaled is not None and self._scaled.due(step):
            self._scaled.exchange(step)

    def after(self, step: int) -> None:
        """Average the moments whose period ends with this step. A collective call if one does."""
        first, second = self._ending(step)
        if not (first or second):
            return
        for bucket in self._session.buckets:
            names = [param.name for param in bucket.slices]
            self._average(names, lambda field: second if field in _SQUARES else first)
        if first and not second:
            self._raise_second_moments()

    @torch.no_grad()
    def _raise_second_moments(self) -> None:
        """Raise Adam's second moments to the least that is possible with the first ones.

        An entry that had gradients only on other replicas now has the mean of their first moments, and 0 as
        second moment: the next step would divide by `eps`.
        """
        mine = {id(p) for p in self._named.values()}
        for optimizer in self._optimizers:
            for group in (group for group in optimizer.param_groups if "betas" in group):
                least = least_variance(*map(float, group["betas"][:2]))
                for p in (p for p in group["params"] if id(p) in mine):
                    state = {field: local(each) for field, each in optimizer.state.get(p, {}).items()}
                    for field in _SQUARES & state.keys() if "exp_avg" in state else ():
                        first, second = state["exp_avg"], state[field]
                        bound = first.abs() if field == "exp_inf" else first.square().mul_(least)
                        torch.maximum(second, bound, out=second)

    def _ending(self, step: int) -> tuple[bool, bool]:
        """Whether the periods of first and of second moments end with this step."""
        if (every := self._periods) is None:
            return False, False
        return (step + 1) % every.first_every == 0, (step + 1) % every.second_every == 0

    def consolidate(self) -> None:
        """Average state that has stayed local. A collective call.

        Plain DDP, which may follow, gives all replicas the same gradients: with unequal momenta their
        parameters would diverge.
        """
        if self._kind == "local" or self._periods is not None:
            for bucket in self._session.buckets:
                self._average([param.name for param in bucket.slices])
        if self.variance is not None:
            self.variance.restore()
        self._flat.clear()

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        if self.variance is not None:
            self.variance.close()

    def _states(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {
            f"{i} {name}": optimizer.state[self._named[name]]
            for i, optimizer in enumerate(self._optimizers)
            for name in names
            if name in self._named and self._named[name] in optimizer.state
        }

    def _average(self, names: Collection[str], wanted: Callable[[str], bool] = lambda field: True) -> None:
        fields: dict[str, dict[str, Tensor]] = {}
        for key, state in self._states(names).items():
            shape = self._named[key.partition(" ")[2]].shape
            for field, value in state.items():
                like_it = torch.is_tensor(value) and value.shape == shape and value.dim()
                if like_it and local(value).numel() and wanted(field):
                    fields.setdefault(field, {})[key] = local(value)
        keys = [f"{field} {key} {each.dtype}" for field in fields for key, each in fields[field].items()]
        if not self._agreed(keys):
            if not self._warned:
                _log.warning("optimizers keep other state on other ranks: each goes on with its own")
            self._warned = True
            return
        for field in sorted(fields):
            self._mean(list(fields[field].values()), field)

    def _agreed(self, keys: Sequence[str]) -> bool:
        """Whether all ranks have the same fields to average; a rank that has not stepped yet has none."""
        mine = torch.tensor([zlib.crc32("|".join(sorted(keys)).encode())])
        scope = self._session.strategy.topology.scope
        return alike(self._session.ask(lambda: gather(mine, scope), "moments"))

    def _mean(self, tensors: Sequence[Tensor], what: str) -> None:
        """Overwrite tensors with the peers' mean, in one message for each type."""
        scope = self._session.strategy.topology.scope
        for dtype in sorted({each.dtype for each in tensors}, key=str):
            same = [each for each in tensors if each.dtype == dtype]
            flat = self._room(dtype, sum(each.numel() for each in same))
            pieces = torch.split(flat, [each.numel() for each in same])
            for each, piece in zip(same, pieces, strict=True):
                piece.view_as(each).copy_(each)
            self._session.ask(partial(average_, flat, scope), f"{what} {dtype}", of=flat)
            for each, piece in zip(same, pieces, strict=True):
                each.copy_(piece.view_as(each))

    def _room(self, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in self._flat or self._flat[dtype].numel() < numel:
            self._flat[dtype] = torch.empty(numel, dtype=dtype, device=self._session.buckets[0].device)
        return self._flat[dtype][:numel]


def _zero(state: dict[str, Any]) -> None:
    """Reset state as before the first step, so that Adam corrects its bias from the start."""
    for field, value in state.items():
        if torch.is_tensor(value):
            local(value).zero_()
        elif field == "step":
            state[field] = 0


def _check_resettable(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        if isinstance(optimizer, _NOT_FROM_ZERO):
            raise AttachError(
                f"momentum='reset' zeroes the optimizer's state, and that of {type(optimizer).__name__} does "
                "not begin with zeros: write momentum='local' or 'averaged', or use SGD or Adam"
            )
