"""What is fixed when a session is made: its training, its strategy and transport, and where its ranks are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.contracts import AxisRank, Compressor, ScheduleState, Spans, Topology, Transport
from tacit.strategy import Strategy


class Coordinate(NamedTuple):
    """A rank's position among the ranks that divide a bucket, and on the axis where compressors meet."""

    near: AxisRank
    here: AxisRank


@lru_cache(1 << 4)
def _in_line(peers: int) -> list[Coordinate]:
    """The coordinates of so many ranks that divide no bucket."""
    return [Coordinate(AxisRank(), AxisRank(rank, peers)) for rank in range(peers)]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The facts of a training that its session needs.

    Attributes:
        rates: reads the present learning rate of each parameter that has one.
        bucket_lr: reads the learning rate of a bucket by its name, if not all have the same.
        schedule_state: further values that the rounds need (`Rounds.needs`).
        idle: whether a parameter had no gradient in this rank's backward. Its mean is then applied only if it
            had one on some rank. None: all means are applied.
        trained: the names of the parameters that DDP would exchange; None: all.
        replicated_in_node: the parameters that are equal on all ranks of a node after every step, unless the
            rounds let them diverge.
        seed: part of every random draw.
    """

    rates: Callable[[], Mapping[str, float]] = dict
    bucket_lr: Callable[[str], float] | None = None
    schedule_state: ScheduleState = field(default_factory=dict)
    idle: Callable[[str], bool] | None = None
    trained: Collection[str] | None = None
    replicated_in_node: Collection[str] = ()
    seed: int = 0


@dataclass(frozen=True)
class SessionContext:
    """The configuration of a session, which is fixed when it is made and does not depend on its buckets.

    Attributes:
        tensors: the trainable parameters, by name.
        policy: chooses each parameter's compressor; None: dense.
        training: of which the session is a part.
        device: where buckets are exchanged; None: where the parameters are.
        in_stream: whether they are exchanged on a device that the host does not wait for.
    """

    strategy: Strategy
    transport: Transport
    tensors: Mapping[str, Tensor]
    policy: Callable[[str, Tensor], Compressor | None]
    training: Training = field(default_factory=Training)
    device: torch.device | None = None
    in_stream: bool = False

    @property
    def topology(self) -> Topology:
        """The strategy's."""
        return self.strategy.topology

    @property
    def apart(self) -> bool:
        """Whether the mean may be written to another tensor than the input."""
        return self.strategy.subject == "delta"

    @cached_property
    def ranks(self) -> list[int]:
        """The replicas that take part in a round, and are equal after it."""
        return list(self.transport.ranks(self.topology.scope))

    @cached_property
    def global_ranks(self) -> list[int]:
        """Their ranks among all processes of the job, for messages to users."""
        return [self.transport.global_rank(rank) for rank in self.ranks]

    @cached_property
    def me(self) -> int:
        """This rank's index among `ranks`."""
        return self.transport.place(self.topology.scope).rank

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node divide what is sent between nodes."""
        return self.topology.scope != self.topology.meets

    def spans(self, edges: Sequence[int] | range) -> Spans:
        """The span of a bucket that each rank of the node handles."""
        return self.topology.spans(edges, self.coordinate.near)

    @cached_property
    def coordinates(self) -> list[Coordinate]:
        """The coordinates of `ranks`."""
        if not self.by_node:
            return _in_line(len(self.ranks))
        nodes = self.transport.nodes
        where = {
            rank: Coordinate(AxisRank(i, len(node)), AxisRank(m, len(nodes)))
            for m, node in enumerate(nodes)
            for i, rank in enumerate(node)
        }
        return [where[rank] for rank in self.ranks]

    @cached_property
    def in_order(self) -> bool:
        """Whether `ranks` are, in equal parts, those of the first rank of the axis, of the second, and so on.

        With nodes: those of the first node, and so on.
        """
        here = self.coordinate.here.peers
        each, rest = divmod(len(self.ranks), here)
        if not self.by_node:
            return True
        return not rest and all(at.here.rank == i // each for i, at in enumerate(self.coordinates))

    @cached_property
    def coordinate(self) -> Coordinate:
        """The coordinate of this rank."""
        if not self.by_node:
            return Coordinate(AxisRank(), AxisRank(self.me, len(self.ranks)))
        rank, nodes = self.ranks[self.me], self.transport.nodes
        m = next(m for m, node in enumerate(nodes) if rank in node)
        return Coordinate(AxisRank(nodes[m].index(rank), len(nodes[m])), AxisRank(m, len(nodes)))

    @cached_property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.tensors.values())

    @cached_property
    def dense_bytes(self) -> int:
        """The bytes that DDP would exchange in a step."""
        trained = self.tensors if self.training.trained is None else self.training.trained
        return sum(self.tensors[name].numel() * self.tensors[name].element_size() for name in trained)
