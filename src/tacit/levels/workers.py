"""The base of levels whose parameters are kept by servers, or by a store in each rank."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tacit.levels.deltas import DeltaLevel
from tacit.levels.level import COMPARING
from tacit.replicas.buffers import numbers_in, variances_in
from tacit.replicas.replica import LiveTensors
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.stores.client.placement import wait_for_all


class WorkerLevel(DeltaLevel):
    """A level whose workers step alone and exchange with servers, buffers too, without waiting for others."""

    def _begin(self) -> None:
        module, named = self._spec.model.module, self._spec.named
        tensors = {**named, **LiveTensors(module, numbers_in(self._spec.model))}
        self._open(tensors, self._buckets(tensors))
        self.session.connect(COMPARING)
        live, variances = LiveTensors(module, tensors, named), variances_in(module)
        self._hook_in(OptimizerHook(self.session, live, self._share, self._rates, None, variances))
        self.fetch()

    def _kept(self) -> Callable[[str, Tensor], Tensor]:
        """A function that sends this rank's values of a bucket to the server or store, and returns its."""
        servers, star = self._servers, self.strategy.server
        assert servers is not None
        assert star is not None
        return lambda bucket, x: servers.server_of(bucket).enter(x, f"{bucket}/0", star.back(x))

    def fetch(self) -> None:
        self.progress.enter(self._kept())
        wait_for_all(self._spec.group)
