"""The base of levels whose replicas step alone, and exchange their deltas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from tacit.levels.level import Level, parts_cut
from tacit.replicas.consensus import Consensus
from tacit.replicas.fragments import fragments
from tacit.replicas.rounds_after_step import OptimizerHook


class DeltaLevel(Level):
    """Base of levels with a hook after `optimizer.step`, which they make in `_begin`."""

    steps_alone: ClassVar[bool] = True
    progress: OptimizerHook

    def _buckets(self, tensors: Mapping[str, Tensor]) -> list[list[str]]:
        """The buckets: each part of the model is cut separately."""
        parts = fragments(tensors, self.strategy.parts)
        return parts_cut(parts, self._cut(tensors), self._spec.named)

    def _hook_in(self, hook: OptimizerHook) -> None:
        """Call this hook before and after every step."""
        self.progress, self.take_loaded, self.after_step = hook, hook.before_step, hook.after_step

    def observe(self, loss: Tensor | float) -> None:
        self.progress.observations.observe(loss)

    def acts_after(self, step: int) -> bool:
        return self.progress.acts_after(step)

    def act(self, step: int) -> None:
        self.progress.act(step)

    def note_writes(self) -> None:
        self.progress.writes.note()

    @property
    def has_moved(self) -> bool:
        return self.progress.writes.seen

    @property
    def steps_since_equal(self) -> int | None:
        return self.progress.steps_since_equal

    @property
    def begun(self) -> int:
        return self.session.lanes.posted  # after steps ranks also exchange outside of rounds

    def discard(self) -> None:
        self.progress.observations.take_back()

    def sync(self) -> None:
        self.progress.sync()

    def measure_consensus(self) -> Consensus | None:
        return self.progress.measure_consensus()

    def metrics(self) -> dict[str, float]:
        last = self.progress.consensus.last
        return super().metrics() | ({} if last is None else last.metrics())
