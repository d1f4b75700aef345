"""The level at which servers take the steps."""

from __future__ import annotations

from typing import ClassVar

from tacit.levels.level import COMPARING, Level, parts_cut
from tacit.replicas.buffers import numbers_in
from tacit.replicas.replica import LiveTensors
from tacit.session.buckets import most_bytes
from tacit.stores.client.buffers import ServerBuffers
from tacit.stores.client.joining import join_servers
from tacit.stores.client.placement import find_servers, wait_for_all
from tacit.stores.client.step_hook import OptimizerGroups, ServerStepHook


class SteppedLevel(Level):
    """A level that pushes gradients in place of `optimizer.step`, and pulls parameters."""

    steps_alone: ClassVar[bool] = True

    def _begin(self) -> None:
        spec, named, module = self._spec, self._spec.named, self._spec.model.module
        star = self.strategy.server
        assert star is not None
        groups = OptimizerGroups(spec.optimizers, named)
        still = dict(LiveTensors(module, numbers_in(spec.model)))
        cap = most_bytes(self.strategy.topology, int(spec.model.bucket_bytes_cap))
        where = find_servers(spec.servers)
        joined = join_servers(
            *(self.strategy, where, self.peers, named, cap, spec.time_limit), groups=groups, beside=still
        )
        self.transport, self._servers = joined.transport, joined.transport.servers
        beside = ServerBuffers(module, [*still], self._servers, joined.homes, joined.cap)
        buckets = parts_cut([[*reversed(named)]], joined.cut, named)
        self._open(named, buckets, self._watch_used(), groups.rate)
        self.session.connect(COMPARING)
        self._hook = ServerStepHook(self.session, named, star.back, groups, beside)
        self.before_step, self.after_step = self._hook.before_step, self._hook.after_step
        self.fetch()

    def fetch(self) -> None:
        servers, star = self._servers, self.strategy.server
        assert servers is not None
        assert star is not None
        self._hook.enter(lambda bucket, x: servers.server_of(bucket).enter(x, f"{bucket}/0", star.back(x)))
        wait_for_all(self._spec.group)

    def reload(self) -> None:
        super().reload()
        self._hook.resume()

    def sync(self) -> None:
        self._hook.sync()
