"""How buckets will be exchanged, before memory is allocated: which rank handles which part, at what cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tacit.contracts import (
    NODE,
    AxisRank,
    Context,
    Spans,
    Workspace,
    flags,
    on_meta,
    state_dtype,
)
from tacit.kernels.dispatch import warmed_up_for
from tacit.session.buckets import Bucket, make_buckets
from tacit.session.dry_run_cache import Place, RememberedRuns
from tacit.session.session_context import Coordinate, SessionContext
from tacit.transports.meter import Cost, DryRun, run_dry

_RUNS = RememberedRuns()


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
        bucket, ranks = self.buckets[i], len(self.session_context.ranks)
        owned: Spans = ()
        if self.session_context.in_order:
            more = self.session_context.in_stream  # numbers of overflow
            owned = ((0, ranks), (nonfinite_flags.numel() - ranks, nonfinite_flags.numel()))[: 1 + more]
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
            nonfinite_flags=flags(nonfinite_flags, owned, *coordinate.here) if carries_flags else None,
            replicas=ranks,
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
        place_and_size = (
            len(context.ranks),
            context.in_order,
            self.buckets[i],
            self.spans[i],
            tuple(coordinate),
        )
        key = (*settings, warmed_up_for(), *place_and_size)  # a run compiles kernels, too, for that device
        return _RUNS.run(key, dry_run, place, run)

    def _run_dry(self, i: int, dry_run: DryRun, coordinate: Coordinate, step: int, place: Place) -> Cost:
        bucket, compressor = self.buckets[i], self.piece(i, coordinate.near).compressor
        state, x = self.first_state(i, coordinate), bucket.like()
        out = bucket.like() if self.session_context.apart else x
        ctx = self.context(i, coordinate, dry_run, self.nonfinite_flags(i, "meta"))(out=out, step=step)
        with on_meta(", ".join(dict.fromkeys(map(str, bucket.chosen)))):
            outcome, cost = run_dry(self.session_context.topology.conduct(x, compressor, state, ctx), place)
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{compressor} changes the shape of its state"
        return cost
