"""What is fixed when a session is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tacit.session.plan import SessionContext
from tacit.session.topology_choice import TopologyChoice
from tacit.strategy import Strategy


@dataclass(frozen=True)
class SessionConfig:
    """What is fixed when a session is made, whatever becomes of its buckets.

    Attributes:
        strategy: with the topology that is at work.
        choice: how that topology compares with others, where the strategy leaves it open.
        context: the tensors, and who exchanges them where.
        lr: reads the largest present learning rate.
        bucket_lr: reads that of a bucket by the bucket's name, where not all have the same.
        replicated_in_node: the parameters that the ranks of a node have alike after every step, except where
            the rounds let them diverge.
        dense_bytes: bytes of all that DDP would exchange in a step.
    """

    strategy: Strategy
    choice: TopologyChoice
    context: SessionContext
    lr: Callable[[], float]
    bucket_lr: Callable[[str], float] | None
    replicated_in_node: frozenset[str]
    dense_bytes: int

    @property
    def in_stream(self) -> bool:
        """Whether exchanges run on a device that the host does not wait for."""
        return self.context.in_stream

    @property
    def independent(self) -> bool:
        """Whether replicas go on without each other."""
        return self.context.independent
