"""Keeps parameters equal where ranks average gradients: they differ only if one rank alone writes to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import WORLD
from tacit.exchange.joined_requests import average_, gather
from tacit.model.trained_model import locals_of
from tacit.replicas.anchor_comparison import Checksums, alike
from tacit.session import Session
from tacit.transports.process_groups import gathered, sum_

_log = logging.getLogger("tacit")

WRITE = (
    "Where gradients are averaged, what a script writes to parameters must be the same on every rank: load "
    "weights on all of them, or on one and then send them, dist.broadcast(p.data, src=0) for each parameter"
)


class EqualParameters:
    """Compares the bits of all ranks' parameters, and makes them equal if they differ.

    Args:
        session: its ranks compare.
        named: the parameters that are trained.
        group: DDP's process group, if DDP exchanges the gradients itself.
    """

    def __init__(
        self, session: Session, named: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
    ) -> None:
        self._session, self._named, self._group = session, named, group
        self._equal_at: int | None = None

    def sync(self) -> None:
        """Replace parameters that differ by their mean, and warn with their names. A collective call.

        Raises:
            RoundError: the exchange failed.
        """
        session, ranks = self._session, self._session.transport.ranks(WORLD)
        mine = {name: x.detach() for name, x in locals_of(self._named).items()}
        sums = Checksums((name, x.reshape(-1)) for name, x in mine.items())
        step, since, self._equal_at = session.step, self._equal_at, session.step
        if alike(self._gathered(sums.whole())):
            return
        apart = sums.differing(self._gathered(sums.each()))
        away = max(self._to_mean(name, mine[name]) for name in apart.names)
        known_as = [session.transport.global_rank(rank) for rank in ranks]
        before = "nobody had compared before" if since is None else f"they were equal after step {since}"
        if session.transport.place(WORLD).rank == 0:
            _log.warning(
                "after step %d of %r %s had other bits on %s (%s). They are their mean now, "
                "from which those of rank %d were up to %.2g of their norm away. %s",
                *(step, session.strategy.name, apart.named, apart.on(known_as), before, known_as[0], away),
                WRITE,
            )

    def _to_mean(self, name: str, x: Tensor) -> float:
        """Overwrite a parameter with the ranks' mean; returns its distance to that, relative to that."""
        mean = x.flatten().clone()
        if self._group is None:
            self._session.ask(partial(average_, mean, WORLD), name, of=mean)
        else:
            sum_(mean.div_(self._group.size()), self._group).wait()
        norm, away = float(mean.norm()), float((mean - x.flatten()).norm())
        with torch.no_grad():
            x.copy_(mean.view_as(x))
        return away / norm if norm else away

    def _gathered(self, numbers: Tensor) -> list[Tensor]:
        if self._group is None:
            return self._session.ask(partial(gather, numbers, WORLD), "checksums")
        return gathered(numbers, self._group)
