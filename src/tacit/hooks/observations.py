"""What adaptive rounds are told of the training, averaged over the ranks that agree in a round."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tacit.errors import ConfigError
from tacit.exchange.combinators import hear
from tacit.session import PendingRound, Session


class Observations:
    """Collects what this rank knows, and tells the session's rounds what all ranks know.

    Args:
        session: whose rounds want it, or do not.
        lr: reads the present learning rate.
    """

    def __init__(self, session: Session, lr: Callable[[], float]) -> None:
        self._session, self._lr = session, lr
        self._wants = session.strategy.rounds.observed_metrics
        self.losses = torch.zeros(2, dtype=torch.float64)
        """The sum of the losses since the facts before, and how many they are."""
        self._apart = 0.0
        self._flown: list[float] = []
        self._steps: list[float] = []
        self._mark: tuple[int, float] | None = None
        self._waited = 0.0

    def observe(self, loss: Tensor | float) -> None:
        """Note the loss of a step."""
        if "loss" in self._wants:
            self.losses[0] += float(loss.detach() if isinstance(loss, Tensor) else loss)
            self.losses[1] += 1

    def measure(self, progress: Sequence[Tensor]) -> None:
        """Note how far this rank is from the anchor."""
        if "drift" in self._wants:
            self._apart = _square(progress)

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """Training waits for an answer: that is not the time that a step takes."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def flown(self, pending: PendingRound | None, lag: int) -> None:
        """Note how long a late round was on its way."""
        if "transfer" in self._wants and pending is not None and lag:
            self._flown.append(pending.seconds)

    def tell_times(self, step: int) -> None:
        """Tell the rounds for how many steps transfers take, before the round of `step` leaves."""
        if "transfer" not in self._wants:
            return
        session, now = self._session, time.perf_counter()
        if self._mark is not None and step > self._mark[0]:
            self._steps.append((now - self._mark[1] - self._waited) / (step - self._mark[0]))
        rounds = session.strategy.rounds
        if rounds.asks(step, session.schedule_state):
            mine = torch.tensor([_ratio(self._flown, self._steps)], dtype=torch.float64)
            all_ = session.ask(lambda: hear(mine, session.strategy.topology.scope), "facts")
            facts = {"step": step, "lr": self._lr(), "transfer": max(float(each) for each in all_)}
            session.schedule_state = rounds.observe(session.schedule_state, facts)
            self._flown.clear()
            self._steps.clear()
        self._mark, self._waited = (step, time.perf_counter()), 0.0

    def tell(self, step: int, pending: PendingRound | None, mean: Sequence[Tensor]) -> None:
        """Tell the rounds what all ranks know, after the round of `step` has left.

        Raises:
            ConfigError: a rank was not told the loss; on all ranks.
        """
        session = self._session
        if not self._wants - {"transfer"} or not session.strategy.rounds.asks(step, session.schedule_state):
            return
        if "drift" in self._wants and pending is not None:
            session.wait(pending)
        total, count = self.losses.tolist()
        mine = torch.tensor([total / max(count, 1), min(count, 1), self._apart], dtype=torch.float64)
        all_ = session.ask(lambda: hear(mine, session.strategy.topology.scope), "facts")
        losses, told, independent = zip(*(each.tolist() for each in all_), strict=True)
        if "loss" in self._wants:
            self._check_told(step, told)
        self.losses.zero_()
        facts = {"step": step, "lr": self._lr(), "loss": _mean(losses)}
        if "drift" in self._wants:
            facts["drift"] = max(0.0, _mean(independent) - _square(mean))
        session.schedule_state = session.strategy.rounds.observe(session.schedule_state, facts)

    def _check_told(self, step: int, told: Sequence[float]) -> None:
        silent = [rank for rank, each in zip(self._session.ranks, told, strict=True) if not each]
        if not silent:
            return
        who = "no rank has" if len(silent) == len(told) else f"ranks {silent} have not"
        raise ConfigError(
            f"rounds={self._session.strategy.rounds} go by the loss, and up to step {step} {who} told it: "
            "write session.observe(loss) in every step, on every rank"
        )


def _mean(values: Sequence[float]) -> float:
    """In rank order, so that all ranks get the same bits."""
    return sum(values) / len(values)


def _ratio(flown: Sequence[float], steps: Sequence[float]) -> float:
    """For how many steps a transfer was on its way. Of the steps a low one: others may hold an evaluation."""
    if not flown or not steps:
        return 0.0
    step = sorted(steps)[(len(steps) - 1) // 2]
    return sum(flown) / len(flown) / max(step, 1e-9)


def _square(tensors: Sequence[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in tensors)
