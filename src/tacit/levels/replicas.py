"""The level that averages replicas which have stepped alone."""

from __future__ import annotations

from collections.abc import Callable

from tacit.levels.deltas import DeltaLevel
from tacit.replicas.buffers import ReplicaBuffers, found_in
from tacit.replicas.optimizer_state import OptimizerState
from tacit.replicas.replica import LiveTensors
from tacit.replicas.rounds_after_step import OptimizerHook


class ReplicaLevel(DeltaLevel):
    """A level whose replicas average their deltas, and wait for each other; servers may do the averaging.

    Attributes:
        moments: the optimizers' state.
    """

    def _begin(self) -> None:
        spec, strategy, named = self._spec, self.strategy, self._spec.named
        self._open(named, self._buckets(named))
        self.session.connect(ReplicaBuffers.stages(self.session))
        module, near = spec.model.module, None if spec.sharded is None else spec.sharded.near
        self.moments = OptimizerState(self.session, spec.optimizers, named, near)
        self._averaged = ReplicaBuffers(self.session, LiveTensors(module, found_in(spec.model)), self._share)
        hook = OptimizerHook(
            self.session,
            LiveTensors(module, named, named),
            self._share,
            self._rates,
            self._averaged if strategy.buffers == "averaged" else None,
            moments=self.moments,
            on_sync=self._averaged if strategy.buffers == "on_sync" else None,
        )
        self._hook_in(hook)
        if spec.sharded is not None:
            hook.observations.share_with(near)
            hook.consensus.leave_out()

    def count_by(self, step: Callable[[], int]) -> None:
        self.moments.count_by(step)

    def consolidate(self) -> None:
        self.moments.consolidate()
        if self.strategy.buffers == "local":
            self._averaged.average()
            self._averaged.copy_first()

    def _let_go(self) -> None:
        self.moments.close()
