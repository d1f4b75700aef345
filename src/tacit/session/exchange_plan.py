"""How buckets will be exchanged, before any memory is spent on them: who shares what out, and its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.contracts import (
    NODE,
    AxisRank,
    Context,
    MixingTopology,
    NodeTopology,
    ServerTopology,
    Spans,
    Topology,
    Transport,
    Workspace,
    on_meta,
    state_dtype,
)
from tacit.exchange.health import finite
from tacit.session.buckets import Bucket, Policy, make_buckets
from tacit.session.dry_runs import Place, RememberedRuns
from tacit.strategy import Strategy
from tacit.transports.meter import Cost, DryRun, run_dry

_RUNS = RememberedRuns()


class Coordinate(NamedTuple):
    """A rank's place among those that share a bucket out, and where compressors meet."""

    near: AxisRank
    here: AxisRank


@dataclass(frozen=True)
class SessionContext:
    """What stays the same when other buckets are made.

    Attributes:
        tensors: the trainable parameters, by name.
        idle: whether a parameter took no part in this rank's backward, where what the ranks agree on
            for it is applied only if it did on some rank. None: all is applied.
        seed: part of every random draw.
        device: where buckets are exchanged; None: where the parameters are.
        in_stream: whether they are exchanged on a device that the host does not wait for.
        apart: whether the mean may go elsewhere than into what was given.
    """

    topology: Topology
    transport: Transport
    tensors: Mapping[str, Tensor]
    policy: Policy
    idle: Callable[[str], bool] | None = None
    seed: int = 0
    device: torch.device | None = None
    in_stream: bool = False
    apart: bool = False

    @cached_property
    def ranks(self) -> list[int]:
        """The replicas that agree in a round."""
        return list(self.transport.ranks(self.topology.scope))

    @cached_property
    def global_ranks(self) -> list[int]:
        """What users know them by: their ranks among all processes of the job."""
        return [self.transport.global_rank(rank) for rank in self.ranks]

    @cached_property
    def me(self) -> int:
        """This rank's place among them."""
        return self.transport.place(self.topology.scope).rank

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node share out what crosses between nodes."""
        return self.topology.scope != self.topology.meets

    @property
    def independent(self) -> bool:
        """Whether replicas go on without each other."""
        return isinstance(self.topology, ServerTopology) and self.topology.independent

    def spans(self, edges: Sequence[int] | range) -> Spans:
        """Which stretch of a bucket each rank of the node takes; see `NodeTopology`. One alone: the whole."""
        if isinstance(self.topology, NodeTopology):
            return self.topology.spans(edges, self.coordinate.near)
        return ((0, edges[-1]),)

    @cached_property
    def coordinates(self) -> list[Coordinate]:
        """Those of the replicas that agree in a round."""
        if not self.by_node:
            return [
                Coordinate(AxisRank(), AxisRank(rank, len(self.ranks))) for rank in range(len(self.ranks))
            ]
        nodes = self.transport.nodes
        where = {
            rank: Coordinate(AxisRank(i, len(node)), AxisRank(m, len(nodes)))
            for m, node in enumerate(nodes)
            for i, rank in enumerate(node)
        }
        return [where[rank] for rank in self.ranks]

    @cached_property
    def coordinate(self) -> Coordinate:
        """This rank's."""
        if not self.by_node:
            return Coordinate(AxisRank(), AxisRank(self.me, len(self.ranks)))
        return self.coordinates[self.me]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.tensors.values())


@dataclass(frozen=True)
class SessionConfig:
    """What is fixed when a session is made, whatever becomes of its buckets.

    Attributes:
        strategy: with the topology that is at work.
        context: the tensors, and who exchanges them where.
        bucket_lr: reads the learning rate of a bucket by its name, where not all have the same.
        replicated_in_node: the parameters that the ranks of a node have alike after every step, except where
            the rounds let them diverge.
        dense_bytes: bytes of all that DDP would exchange in a step.
    """

    strategy: Strategy
    context: SessionContext
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


class Plan:
    """Buckets, and which stretch of each a rank of the node hands to its compressor.

    Args:
        all_to_one: the first rank of a node takes everything, whatever the topology says.
    """

    def __init__(
        self, session_context: SessionContext, names: Sequence[Sequence[str]], all_to_one: bool = False
    ) -> None:
        self.session_context = session_context
        self.buckets = make_buckets(
            names, session_context.tensors, session_context.policy, session_context.device
        )
        others = session_context.coordinate.near.peers - 1
        self.spans: list[Spans] = [
            ((0, bucket.numel), *[(bucket.numel, bucket.numel)] * others)
            if all_to_one
            else session_context.spans(bucket.edges)
            for bucket in self.buckets
        ]

    def piece(self, i: int, near: AxisRank) -> Bucket:
        """What the rank `near` of the node hands to its compressor of bucket `i`."""
        bucket, spans = self.buckets[i], self.spans[i]
        return bucket.within(*spans[near.rank]) if len(spans) > 1 else bucket

    def keeps(self, i: int, coordinate: Coordinate) -> Mapping[str, tuple[int, int]]:
        """What the topology keeps there: field -> the stretch of the piece that it is about."""
        piece = self.piece(i, coordinate.near)
        return self.session_context.topology.keeps(piece.numel, piece.compressor, coordinate.here)

    def first_state(
        self, i: int, coordinate: Coordinate, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """The compressor's, and what the topology keeps itself."""
        piece = self.piece(i, coordinate.near)
        state = dict(piece.compressor.init(piece.like(device)))
        for field, (start, stop) in self.keeps(i, coordinate).items():
            state[field] = torch.zeros(stop - start, dtype=state_dtype(piece.dtype), device=device)
        return state

    def context(
        self, i: int, coordinate: Coordinate, work: Workspace, nonfinite_flags: Tensor
    ) -> Callable[..., Context]:
        """Makes the contexts of bucket `i` there, of what is not the same in all of its exchanges.

        Where a payload could hide a NaN, or parameters may be idle, `nonfinite_flags` go along.
        """
        bucket = self.buckets[i]
        carries_flags = (
            bucket.compressor.hides_nonfinite
            or self.session_context.independent
            or isinstance(self.session_context.topology, MixingTopology)
            or self.reports_idle(i)
        )
        return partial(
            Context,
            work=work,
            peers=coordinate.here.peers,
            rank=coordinate.here.rank,
            near=coordinate.near,
            spans=self.spans[i],
            nonfinite_flags=nonfinite_flags if carries_flags else None,
            replicas=len(self.session_context.ranks),
            name=bucket.name,
            seed=self.session_context.seed,
        )

    def reports_idle(self, i: int) -> bool:
        """Whether the ranks must know which parameters were idle on all of them: where something is kept."""
        return self.session_context.idle is not None and bool(
            self.first_state(i, self.session_context.coordinate)
        )

    def nonfinite_flags(self, i: int, device: torch.device | str = "cpu") -> Tensor:
        """A number a rank, in which it reports NaN, and perhaps one a parameter: whether it was idle.

        Where exchanges are not waited for, one more a rank, in which it reports what overflowed on the way.
        """
        slices = len(self.buckets[i].slices) if self.reports_idle(i) else 0
        ranks = len(self.session_context.ranks)
        return torch.zeros(
            ranks + slices + ranks * self.session_context.in_stream, device=device, dtype=torch.float32
        )

    def run_dry(self, i: int, dry_run: DryRun, coordinate: Coordinate | None = None, step: int = 0) -> Cost:
        """What an exchange of bucket `i` costs the rank there, this one or another; on meta tensors."""
        context, coordinate = self.session_context, coordinate or self.session_context.coordinate

        def place(axis: str) -> AxisRank:
            if axis == context.topology.meets:
                return coordinate.here
            return coordinate.near if axis == NODE and context.by_node else context.transport.place(axis)

        def run(work: DryRun, place: Place) -> Cost:
            return self._run_dry(i, work, coordinate, step, place)

        settings = context.topology, context.apart, context.idle is None, context.in_stream, step
        key = (*settings, len(context.ranks), self.buckets[i], self.spans[i], tuple(coordinate))
        return _RUNS.run(key, dry_run, place, run)

    def _run_dry(self, i: int, dry_run: DryRun, coordinate: Coordinate, step: int, place: Place) -> Cost:
        bucket, compressor = self.buckets[i], self.piece(i, coordinate.near).compressor
        state, x = self.first_state(i, coordinate), bucket.like()
        out = bucket.like() if self.session_context.apart else x
        ctx = self.context(i, coordinate, dry_run, self.nonfinite_flags(i, "meta"))(out=out, step=step)
        with on_meta(", ".join(dict.fromkeys(map(str, bucket.chosen)))):
            outcome, cost = run_dry(self.session_context.topology.conduct(x, compressor, state, ctx), place)
        finite(outcome.mean)  # so that what looks at means is compiled now
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{compressor} changes the shape of its state"
        return cost
