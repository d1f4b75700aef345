"""How buckets will be exchanged, before memory is allocated: which rank handles which part, at what cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from tacit.contracts import (
    NODE,
    AxisRank,
    Context,
    NodeTopology,
    ScheduleState,
    Spans,
    Topology,
    Transport,
    Workspace,
    on_meta,
    state_dtype,
)
from tacit.exchange.finite_checks import finite
from tacit.session.buckets import Bucket, Policy, make_buckets
from tacit.session.dry_run_cache import Place, RememberedRuns
from tacit.strategy import Strategy
from tacit.transports.meter import Cost, DryRun, run_dry

_RUNS = RememberedRuns()


class Coordinate(NamedTuple):
    """A rank's position among the ranks that divide a bucket, and on the axis where compressors meet."""

    near: AxisRank
    here: AxisRank


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
        training: of which the session is a part.
        device: where buckets are exchanged; None: where the parameters are.
        in_stream: whether they are exchanged on a device that the host does not wait for.
    """

    strategy: Strategy
    transport: Transport
    tensors: Mapping[str, Tensor]
    policy: Policy
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
        """The span of a bucket that each rank of the node handles: all, if alone; see `NodeTopology`."""
        if isinstance(self.topology, NodeTopology):
            return self.topology.spans(edges, self.coordinate.near)
        return ((0, edges[-1]),)

    @cached_property
    def coordinates(self) -> list[Coordinate]:
        """The coordinates of `ranks`."""
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
        """The coordinate of this rank."""
        if not self.by_node:
            return Coordinate(AxisRank(), AxisRank(self.me, len(self.ranks)))
        return self.coordinates[self.me]

    @cached_property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(p.numel() for p in self.tensors.values())

    @cached_property
    def dense_bytes(self) -> int:
        """The bytes that DDP would exchange in a step."""
        trained = self.tensors if self.training.trained is None else self.training.trained
        return sum(self.tensors[name].numel() * self.tensors[name].element_size() for name in trained)


class Plan:
    """Buckets, and the span of each that a rank of the node passes to its compressor.

    Args:
        all_to_one: whether the first rank of a node handles everything, whatever the topology is.
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
        """The part of bucket `i` that the rank `near` of the node passes to its compressor."""
        bucket, spans = self.buckets[i], self.spans[i]
        return bucket.within(*spans[near.rank]) if len(spans) > 1 else bucket

    def keeps(self, i: int, coordinate: Coordinate) -> Mapping[str, tuple[int, int]]:
        """The topology's state at a coordinate: field -> the span of that rank's part of the bucket."""
        piece = self.piece(i, coordinate.near)
        return self.session_context.topology.keeps(piece.numel, piece.compressor, coordinate.here)

    def first_state(
        self, i: int, coordinate: Coordinate, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """The first state of bucket `i` at a coordinate: the compressor's, and the topology's."""
        piece = self.piece(i, coordinate.near)
        state = dict(piece.compressor.init(piece.like(device)))
        for name, (start, stop) in self.keeps(i, coordinate).items():
            state[name] = torch.zeros(stop - start, dtype=state_dtype(piece.dtype), device=device)
        return state

    def context(
        self, i: int, coordinate: Coordinate, work: Workspace, nonfinite_flags: Tensor
    ) -> Callable[..., Context]:
        """A function that makes contexts of bucket `i` at a coordinate, of fields that change by exchange.

        If a payload could hide a NaN, or parameters may be idle, `nonfinite_flags` are in it.
        """
        bucket = self.buckets[i]
        carries_flags = (
            bucket.compressor.hides_nonfinite
            or self.session_context.strategy.independent
            or self.session_context.topology.mixes
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
            seed=self.session_context.training.seed,
        )

    def reports_idle(self, i: int) -> bool:
        """Whether the ranks must know which parameters were idle on all of them, as the bucket has state."""
        return self.session_context.training.idle is not None and bool(
            self.first_state(i, self.session_context.coordinate)
        )

    def nonfinite_flags(self, i: int, device: torch.device | str = "cpu") -> Tensor:
        """The nonfinite flags of bucket `i`: one number a rank, in which it reports NaN.

        They are followed by one a parameter, whether it was idle, if ranks must know; and in stream order by
        one more a rank, in which it reports overflow on the way.
        """
        slices = len(self.buckets[i].slices) if self.reports_idle(i) else 0
        ranks = len(self.session_context.ranks)
        return torch.zeros(
            ranks + slices + ranks * self.session_context.in_stream, device=device, dtype=torch.float32
        )

    def run_dry(self, i: int, dry_run: DryRun, coordinate: Coordinate | None = None, step: int = 0) -> Cost:
        """The cost of an exchange of bucket `i` at a coordinate (by default this rank's), by a dry run."""
        context, coordinate = self.session_context, coordinate or self.session_context.coordinate

        def place(axis: str) -> AxisRank:
            if axis == context.topology.meets:
                return coordinate.here
            return coordinate.near if axis == NODE and context.by_node else context.transport.place(axis)

        def run(work: DryRun, place: Place) -> Cost:
            return self._run_dry(i, work, coordinate, step, place)

        settings = context.topology, context.apart, context.training.idle is None, context.in_stream, step
        key = (*settings, len(context.ranks), self.buckets[i], self.spans[i], tuple(coordinate))
        return _RUNS.run(key, dry_run, place, run)

    def _run_dry(self, i: int, dry_run: DryRun, coordinate: Coordinate, step: int, place: Place) -> Cost:
        bucket, compressor = self.buckets[i], self.piece(i, coordinate.near).compressor
        state, x = self.first_state(i, coordinate), bucket.like()
        out = bucket.like() if self.session_context.apart else x
        ctx = self.context(i, coordinate, dry_run, self.nonfinite_flags(i, "meta"))(out=out, step=step)
        with on_meta(", ".join(dict.fromkeys(map(str, bucket.chosen)))):
            outcome, cost = run_dry(self.session_context.topology.conduct(x, compressor, state, ctx), place)
        finite(outcome.mean)  # so that the check of means is compiled now
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{compressor} changes the shape of its state"
        return cost
