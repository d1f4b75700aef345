"""The level whose replicas average in pairs, each by a store of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from tacit.contracts import PairTopology
from tacit.levels.level import Cut
from tacit.levels.workers import WorkerLevel
from tacit.session.buckets import group_names, most_bytes
from tacit.stores.client.placement import message_cap
from tacit.stores.pairs import PairTransport
from tacit.stores.pairs.members import joined_pairs
from tacit.transports.torch_distributed import TorchTransport


class PairLevel(WorkerLevel):
    """A level whose replicas average in pairs, without waiting for others."""

    transport: PairTransport

    def _cut(self, tensors: Mapping[str, Tensor]) -> Cut:
        spec, topology = self._spec, self.strategy.topology
        assert isinstance(topology, PairTopology)
        assert isinstance(self.peers, TorchTransport)
        self.transport = joined_pairs(self.peers, topology, spec.seed, spec.time_limit)
        # One bucket's answer arrives while the next one is sent.
        most = most_bytes(topology, int(spec.model.bucket_bytes_cap))
        cap = message_cap(self.strategy, tensors, 1, 1, most)
        return lambda names: group_names(names, tensors, cap)

    def _open(
        self,
        tensors: Mapping[str, Tensor],
        buckets: Sequence[Sequence[str]],
        idle: Callable[[str], bool] | None = None,
        bucket_lr: Callable[[str], float] | None = None,
    ) -> None:
        super()._open(tensors, buckets, idle, bucket_lr)
        self.transport.report_to(self.session.failure.fail, lambda: self.session.step)

    def _kept(self) -> Callable[[str, Tensor], Tensor]:
        return self.transport.enter
