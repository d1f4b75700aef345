"""A strategy at work, with what its session reports of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tacit.attaching.active_strategy import ActiveStrategy
from tacit.kernels.dispatch import find_backend
from tacit.session import joined
from tacit.session.description import one_line
from tacit.transports.process_groups import backend_of, rank_in

if TYPE_CHECKING:
    from tacit.planning.decider import Choice
    from tacit.timelines import Timeline


class AtWork(ActiveStrategy):
    """One strategy for the whole session; of several in turn, see `Choosing`.

    Attributes:
        choice: None, as the user named the strategy.
    """

    choice: Choice | None = None

    @property
    def now(self) -> AtWork:
        """The strategy at work: this one."""
        return self

    def observe(self, loss: Tensor | float) -> None:
        """See `Attached.observe`."""
        for level in self.levels:
            level.observe(loss)

    def metrics(self) -> dict[str, float]:
        """See `Attached.metrics`."""
        each = [level.metrics() for level in self.levels]
        apart = {key: value for key, value in each[-1].items() if key.startswith("consensus_")}
        return each[0] if len(each) == 1 else joined(each) | apart

    def timeline(self) -> Timeline:
        """See `Attached.timeline`."""
        from tacit.reporting.timeline import timeline

        strategy = self.spec.strategy
        names = ["exchange"] if len(self.levels) == 1 else [each.name for each in strategy.levels]
        sessions = [level.session for level in self.levels]
        messages = [each for level in self.levels for each in level.messages()]
        return timeline(strategy.name, rank_in(), names, sessions, messages)

    @property
    def active_path(self) -> str:
        """See `Attached.active_path`."""
        if self.spec.leaves_ddp_alone:
            return "DistributedDataParallel, untouched"
        summaries = [level.session.summary for level in self.levels]
        return one_line(self.spec.strategy.name, summaries, self._surroundings())

    def describe(self) -> str:
        """See `Attached.describe`."""
        lines, levels = [self.active_path], self.levels
        for i, level in enumerate(() if self.spec.leaves_ddp_alone else levels):
            of = "" if len(levels) == 1 else f"level {i + 1} of {len(levels)}, "
            lines += ["", f"{of}{self._surroundings()}", *level.session.describe()]
        return "\n".join(lines)

    def _surroundings(self) -> str:
        """The ranks, their backend, where exchanges run, the kernels, and the momentum."""
        levels = self.levels
        peers = len(levels[-1].session.ranks)
        devices = {bucket.device.type for level in levels for bucket in level.session.buckets}
        where = dict.fromkeys(level.placing.words for level in levels if level.placing.words)
        by = ", ".join([backend_of(self.spec.group), *([" and ".join(where)] if where else [])])
        kernels = ", ".join(find_backend(device).description for device in sorted(devices))
        momentum = "" if self.momentum is None else f", {self.momentum}"
        return f"{peers} {'rank' if peers == 1 else 'ranks'} by {by}, kernels: {kernels}{momentum}"
