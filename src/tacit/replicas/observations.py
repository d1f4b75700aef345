"""Measurements for adaptive rounds, averaged over the ranks of a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.contracts import Sync
from tacit.errors import ConfigError, of_ranks
from tacit.exchange.joined_requests import gather
from tacit.session import PendingRound, Session
from tacit.transports.process_groups import gathered


class Observations:
    """Collects this rank's measurements, and passes their mean over the ranks to the session's schedule.

    Args:
        session: its rounds may observe measurements.
        lr: reads the present learning rate.
    """

    def __init__(self, session: Session, lr: Callable[[], float]) -> None:
        self._session, self._lr = session, lr
        self._metrics = session.schedule.observed_metrics
        self.losses = torch.zeros(2, dtype=torch.float64)
        """The sum of the losses since the last observation, and their number."""
        self._noted_in, self._before = -1, self.losses
        self._near: dist.ProcessGroup | None = None
        self._drift = 0.0
        self._transfers: list[float] = []
        self._steps: list[float] = []
        self._mark: tuple[int, float] | None = None
        self._waited = 0.0

    def share_with(self, near: dist.ProcessGroup | None) -> None:
        """Average measurements also with these ranks, which have the other shards of this replica."""
        self._near = near

    def observe(self, loss: Tensor | float) -> None:
        """Note the loss of a step."""
        if "loss" in self._metrics:
            if self._noted_in != self._session.step:
                self._noted_in, self._before = self._session.step, self.losses.clone()
            self.losses[0] += float(loss.detach() if isinstance(loss, Tensor) else loss)
            self.losses[1] += 1

    def take_back(self) -> None:
        """Forget the loss of the present step."""
        if self._noted_in == self._session.step:
            self.losses.copy_(self._before)

    def measure(self, progress: Sequence[Tensor]) -> None:
        """Measure this rank's distance to the anchor."""
        if "drift" in self._metrics:
            self._drift = _square(progress)

    def wait(self, pending: PendingRound, lag: int) -> None:
        """Wait for an answer, whose time does not count as a step's; record how long a late one took."""
        start = time.perf_counter()
        self._session.pending.wait(pending)
        self._waited += time.perf_counter() - start
        if "transfer" in self._metrics and lag:
            self._transfers.append(pending.seconds)

    def observe_times(self, step: int, sync: Sync) -> None:
        """Observe how many steps transfers take, before the round of `step` starts."""
        if "transfer" not in self._metrics:
            return
        session, now = self._session, time.perf_counter()
        if self._mark is not None and step > self._mark[0]:
            self._steps.append((now - self._mark[1] - self._waited) / (step - self._mark[0]))
        if sync.observe:
            mine = torch.tensor([_ratio(self._transfers, self._steps)], dtype=torch.float64)
            mine = self._of_replica(mine).amax(0)
            all_ = session.ask(lambda: gather(mine, session.strategy.topology.scope), "facts")
            facts = {"step": step, "lr": self._lr(), "transfer": max(float(each) for each in all_)}
            session.schedule.observe(facts, session.step)
            self._transfers.clear()
            self._steps.clear()
        self._mark, self._waited = (step, time.perf_counter()), 0.0

    def observe_round(
        self, step: int, sync: Sync, pending: PendingRound | None, mean: Sequence[Tensor]
    ) -> None:
        """Observe the mean of all ranks' measurements, after the round of `step` has started.

        Raises:
            ConfigError: a rank did not get the loss; all ranks raise it.
        """
        session = self._session
        if not self._metrics - {"transfer"} or not sync.observe:
            return
        if "drift" in self._metrics and pending is not None:
            session.pending.wait(pending)
        total, count = self.losses.tolist()
        known = [total / max(count, 1), min(count, 1), self._drift, self._lr()]
        every = self._of_replica(torch.tensor(known, dtype=torch.float64))
        mine = every.mean(0)
        mine[1], mine[3] = every[:, 1].min(), every[:, 3].max()
        all_ = session.ask(lambda: gather(mine, session.strategy.topology.scope), "facts")
        losses, given, drifts, rates = zip(*(each.tolist() for each in all_), strict=True)
        if "loss" in self._metrics:
            self._check_given(step, given)
        self.losses.zero_()
        facts = {"step": step, "lr": max(rates), "loss": _mean(losses)}
        if "drift" in self._metrics:
            facts["drift"] = max(0.0, _mean(drifts) - _square(mean))
        session.schedule.observe(facts, session.step)

    def _of_replica(self, mine: Tensor) -> Tensor:
        """Gather the numbers of the ranks that share this replica, one row each. A collective call."""
        return mine[None] if self._near is None else torch.stack(gathered(mine, self._near))

    def _check_given(self, step: int, given: Sequence[float]) -> None:
        silent = [
            rank for rank, each in zip(self._session.context.global_ranks, given, strict=True) if not each
        ]
        if not silent:
            return
        step = self._session.nonfinite.global_step(step)
        where = "at all" if len(silent) == len(given) else f"on {of_ranks(silent)}"
        raise ConfigError(
            f"rounds={self._session.strategy.rounds} depend on the loss, and up to step {step} "
            f"session.observe(loss) was not called {where}: call it in every step, on every rank"
        )


def _mean(values: Sequence[float]) -> float:
    """The mean, added in rank order, so that all ranks get the same bits."""
    return sum(values) / len(values)


def _ratio(transfers: Sequence[float], steps: Sequence[float]) -> float:
    """The steps that a transfer took, by a low step time, as others may include an evaluation."""
    if not transfers or not steps:
        return 0.0
    step = sorted(steps)[(len(steps) - 1) // 2]
    return sum(transfers) / len(transfers) / max(step, 1e-9)


def _square(tensors: Sequence[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in tensors)
