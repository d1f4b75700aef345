"""The buckets of a session, this rank's parts of them, and their states."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tacit.contracts import (
    NODE,
    AllGatherInto,
    AxisRank,
    Outcome,
    Request,
    Spans,
    State,
    Workspace,
    state_dtype,
)
from tacit.session.buckets import Bucket, StateSlice, group_names, named_state, topology_state
from tacit.session.exchange_plan import Plan
from tacit.session.session_context import Coordinate, SessionContext
from tacit.transports.meter import DryRun

if TYPE_CHECKING:
    from tacit.session.narrow_states import NarrowStates

Fields = dict[tuple[str, str], StateSlice]
"""(parameter, field) -> this rank's part of that state."""


REUSED = 32 << 20
"""The most bytes of a tensor whose memory the C library hands out again (glibc's `M_MMAP_THRESHOLD`).

Larger ones go back to the system, and each page of the next one is a fault: 15 ms for 37 MB.
"""


class BucketWorkspace(Workspace):
    """A bucket's second state buffers, and scratch memory, allocated at attach as the dry run asked.

    Second buffers are there from an exchange until its round cannot be undone any more; then their memory is
    free for activations. Those that cost more to allocate than to keep are kept.

    On a device too: they are allocated on the stream of backward, for which the exchange waits before it
    writes, and a round is committed when the host has waited for it, so that no kernel uses what is freed.

    Attributes:
        spares: second buffers, by state field; those of the fields in `kept` are always there.
    """

    def __init__(
        self, bucket: Bucket, state: State, dry_run: DryRun, narrow: NarrowStates | None = None
    ) -> None:
        self.kept = {name for name, tensor in state.items() if tensor.is_cpu and tensor.nbytes > REUSED}
        self.spares = {name: torch.empty_like(state[name]) for name in self.kept}
        self.held: dict[str, Tensor] = {}
        self.narrow = narrow
        self.scratch_anew(bucket.device, dry_run)

    def scratch_anew(self, device: torch.device, dry_run: DryRun) -> None:
        """Allocate scratch memory as another dry run asked."""
        self.held.clear()
        for key, (shape, dtype) in dry_run.scratched.items():
            self.held[key] = torch.empty(shape, dtype=dtype, device=device)

    def spare(self, field: str, like: Tensor) -> Tensor:
        found = self.spares.get(field) if self.narrow is None else self.narrow.spare(field)
        return self.second(field, like) if found is None else found

    def second(self, field: str, like: Tensor) -> Tensor:
        """The second buffer of a field as it is kept."""
        found = self.spares.get(field)
        if found is None:
            found = self.spares[field] = torch.empty_like(like)
        return found

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.held[key]


class StateStore:
    """Buckets and their first states, made by a dry run of one exchange of every bucket on meta tensors.

    Attributes:
        costs: what a round of each bucket costs.
        nonfinite_flags: for each bucket, numbers in which ranks report NaN; see `Plan.nonfinite_flags`.
    """

    def __init__(self, session_context: SessionContext, names: Sequence[Sequence[str]]) -> None:
        self._context = session_context
        self._plan = plan = Plan(session_context, names)
        self.buckets = plan.buckets
        each = range(len(self.buckets))
        self._pieces = [plan.piece(i, session_context.coordinate.near) for i in each]
        self._states: list[State] = [
            plan.first_state(i, session_context.coordinate, bucket.device)
            for i, bucket in enumerate(self.buckets)
        ]
        dry_runs = [DryRun() for _ in each]
        self.costs = [plan.run_dry(i, dry_runs[i]) for i in each]
        narrow: Sequence[NarrowStates | None] = [None for _ in each]
        if session_context.strategy.residual_bits == 16:
            from tacit.session.narrow_states import NarrowStates

            narrow = found = [NarrowStates(state) for state in self._states]
            self._states = [some.kept(state) for some, state in zip(found, self._states, strict=True)]
        made = zip(self._pieces, self._states, dry_runs, narrow, strict=True)
        self._workspaces = [BucketWorkspace(*each) for each in made]
        self.nonfinite_flags = [
            plan.nonfinite_flags(i, bucket.device if session_context.in_stream else "cpu")
            for i, bucket in enumerate(self.buckets)
        ]
        self._phases = [0 for _ in each]
        self._conduct, self._apart = session_context.topology.conduct, session_context.apart
        self._changes = [bucket.compressor.changes for bucket in self.buckets]
        self._compressors = [piece.compressor for piece in self._pieces]
        here = session_context.coordinate
        known = zip(self.buckets, self._workspaces, self.nonfinite_flags, strict=True)
        self._contexts = [
            partial(
                plan.context(i, here, work, flags),
                share=bucket.numel / max(1, session_context.numel),
                held=work.held,
            )
            for i, (bucket, work, flags) in enumerate(known)
        ]
        self._replaced: dict[int, tuple[State, dict[str, Tensor]]] = {}
        """For gradients, until `stay`: the states that a round replaced, and the second buffers of then."""

    # ---- exchanges ------------------------------------------------------------------------------------

    def exchange(self, i: int, x: Tensor, step: int, **given: Any) -> Generator[Request, Any, Outcome]:
        """The exchange of bucket `i`; `given`: the fields of its `Context` that change by exchange."""
        phase = bisect_right(self._changes[i], step)
        if phase != self._phases[i]:  # payloads have other shapes from now on
            dry_run = DryRun()
            self.costs[i] = self._plan.run_dry(i, dry_run, step=step)
            self._workspaces[i].scratch_anew(self.buckets[i].device, dry_run)
            self._phases[i] = phase
        ctx, state, work = self._contexts[i](step=step, **given), self._states[i], self._workspaces[i]
        if work.narrow is not None:
            conduct = partial(self._conduct, x, self._compressors[i])
            return work.narrow.exchanged(conduct, state, ctx, lambda name: work.second(name, state[name]))
        return self._conduct(x, self._compressors[i], state, ctx)

    @property
    def stages(self) -> dict[str, int]:
        """The collectives of the longest exchange on each axis, and one more for the report of a NaN.

        It is the most over all phases, for the present buckets and for the largest possible ones.
        """
        session_context = self._context
        most: Counter[str] = Counter()
        for cost in self.costs:
            most |= cost.stages
        names = dict.fromkeys(param.name for bucket in self.buckets for param in bucket.slices)
        largest = group_names(sorted(names, key=self._kind), session_context.tensors, cap=sys.maxsize)
        plan, first = (
            Plan(session_context, largest, all_to_one=True),
            AxisRank(0, session_context.coordinate.near.peers),
        )
        for i, bucket in enumerate(plan.buckets):
            for step in (0, *bucket.compressor.changes):
                most |= plan.run_dry(
                    i, DryRun(), Coordinate(first, session_context.coordinate.here), step
                ).stages
        most[session_context.topology.scope] += 1
        return dict(most)

    def _kind(self, name: str) -> tuple[str, str]:
        tensor = self._context.tensors[name]
        return str(tensor.dtype), str(tensor.device)

    def make_room(self, i: int) -> None:
        """Allocate the second buffers of bucket `i`.

        The thread of backward does it, in its stream: the C library keeps memory by thread, and torch that of
        a device by stream, so that it gets that of activations.
        """
        work = self._workspaces[i]
        for name, tensor in self._states[i].items():
            work.second(name, tensor)
        if work.narrow is not None and not self._context.in_stream:
            work.narrow.make_room(self._states[i])

    def commit(self, outcomes: Mapping[int, Outcome], idle: Set[str] = frozenset()) -> None:
        """Replace the states by those that a round led to; `idle` parameters keep their old ones."""
        for i, outcome in outcomes.items():
            old = self._states[i]
            if not self._apart:
                self._replaced[i] = old, dict(self._workspaces[i].spares)
            if not idle.isdisjoint(self.buckets[i].names):
                self._keep(i, old, outcome.state, idle)
            self._states[i] = dict(outcome.state)
            work = self._workspaces[i]
            for name, tensor in outcome.state.items():
                if name not in work.kept:
                    work.spares.pop(name, None)
                elif tensor is work.spares.get(name):
                    work.spares[name] = old[name]

    def take_back(self) -> None:
        """Restore the states from before the last round, which exchanges leave unchanged."""
        for i, (old, spares) in self._replaced.items():
            self._states[i] = old
            self._workspaces[i].spares.update(spares)
        self.stay()

    def stay(self) -> None:
        """Let go of the states from before the last round, which is not to be taken back any more."""
        self._replaced.clear()

    def _keep(self, i: int, old: State, new: State, idle: Set[str]) -> None:
        """Copy the old state of idle parameters into the new one, as DDP discards their answer."""
        before, after = self._views(i, old), self._views(i, new)
        for key, kept in after.items():
            if key[0] in idle and kept.tensor.data_ptr() != before[key].tensor.data_ptr():
                kept.tensor.copy_(before[key].tensor)

    def counted_(self, i: int, x: Tensor) -> None:
        """Overwrite this replica's bucket `i` with its contribution; see `Compressor.counted_`."""
        self._compressors[i].counted_(x, self._states[i])

    def begin_anew(self) -> None:
        """Reset the state of how replicas differ, as they are equal now; see `MixingCompressor`."""
        for i, (bucket, state) in enumerate(zip(self.buckets, self._states, strict=True)):
            kept = {key: each.tensor for key, each in self._views(i, state).items() if each.mixing}
            if kept:
                first = self._views(i, self._plan.first_state(i, self._context.coordinate, bucket.device))
                for key, tensor in kept.items():
                    tensor.copy_(first[key].tensor)

    @property
    def mixing(self) -> set[tuple[str, str]]:
        """The (parameter, field) of state that is valid only together with the other ranks' state."""
        return {key for key, kept in self.named_state().items() if kept.mixing}

    # ---- state by parameter ---------------------------------------------------------------------------

    def named_state(self) -> Fields:
        """All state that this rank keeps."""
        views: Fields = {}
        for i, state in enumerate(self._states):
            views |= self._views(i, state)
        return views

    def _views(self, i: int, state: State) -> Fields:
        piece, mine = self._pieces[i], self._plan.keeps(i, self._context.coordinate)
        views = named_state(piece, {field: t for field, t in state.items() if field not in mine})
        for field, span in mine.items():
            views |= topology_state(piece, span, field, state[field])
        return views

    @cached_property
    def layout(self) -> dict[tuple[str, str], list[StateSlice | None]]:
        """The parts of each (parameter, field), by rank of the node; of the topology's state, by rank of all.

        The parts are meta tensors. The set of (parameter, field) does not depend on how buckets are cut.
        """
        session_context = self._context
        near = [
            AxisRank(rank, session_context.coordinate.near.peers)
            for rank in range(session_context.coordinate.near.peers)
        ]
        parts: dict[tuple[str, str], list[StateSlice | None]] = {}
        for i, bucket in enumerate(self.buckets):
            pieces = [self._plan.piece(i, place) for place in near]
            _note(parts, [named_state(piece, piece.compressor.init(piece.like())) for piece in pieces])
            for param, compressor in zip(bucket.slices, bucket.chosen, strict=True):
                parts |= {(param.name, field): [] for field in session_context.topology.fields(compressor)}
            _note(parts, [self._topology_state(i, coordinate) for coordinate in session_context.coordinates])
        return parts

    def _topology_state(self, i: int, coordinate: Coordinate) -> Fields:
        """The state of bucket `i` that the topology keeps at a coordinate."""
        piece, found = self._plan.piece(i, coordinate.near), Fields()
        for field, (start, stop) in self._plan.keeps(i, coordinate).items():
            meta = torch.empty(stop - start, dtype=state_dtype(piece.dtype), device="meta")
            found |= topology_state(piece, (start, stop), field, meta)
        return found

    def widths(self) -> dict[tuple[str, str], tuple[bool, int]]:
        """For each (parameter, field): whether it is equal on all ranks, and its number of elements."""
        found = {}
        for (name, field), parts in self.layout.items():
            some = next((part for part in parts if part is not None), None)
            together = is_topologys(field) or (some is not None and some.shared)
            found[name, field] = together, self._context.tensors[name].numel() if some is None else some.width
        return found

    @property
    def shares_out(self) -> bool:
        """Whether ranks keep parts of each other's state, so that `gathered` is a collective call."""
        return any(len(self.layout[key]) > 1 for key in self.widths())

    def gathered(self) -> Generator[Request, Any, Fields]:
        """All state of this rank's node, joined from its ranks' parts; the topology's, from those of all."""
        mine = self.named_state()
        whole: Fields = {}
        for key, (together, width) in self.widths().items():
            device = self._context.device or self._context.tensors[key[0]].device
            full = torch.zeros(width, dtype=self._dtype(key), device=device)
            if key in mine:
                full[mine[key].start : mine[key].start + mine[key].tensor.numel()] = mine[key].tensor
            if len(self.layout[key]) > 1:
                axis = self._context.topology.scope if is_topologys(key[1]) else NODE
                yield AllGatherInto(full, _spans(self.layout[key]), axis)
            whole[key] = StateSlice(full, together, 0, width)
        return whole

    def _dtype(self, key: tuple[str, str]) -> torch.dtype:
        """The type of a field, on whichever rank it is kept; if on none, the type that it would have."""
        kept = next((part.tensor.dtype for part in self.layout[key] if part is not None), None)
        return kept or state_dtype(self._context.tensors[key[0]].dtype)

    def restore(self, whole: Mapping[tuple[str, str], Tensor]) -> set[str]:
        """Take this rank's part of the state that `gathered` returned, here or in another run.

        If the topology now keeps no residual of a parameter, the saved one is added to every rank's residual,
        so that their mean stays the same. Returns the parameters for which it was not zero.
        """
        mine = self.named_state()
        for key, kept in mine.items():
            if key in whole:
                kept.tensor.copy_(_of(whole[key], kept))
        orphans = {
            key: new_residual
            for key, new_residual in whole.items()
            if is_topologys(key[1]) and not any(self.layout.get(key, ()))
        }
        for (name, _), new_residual in orphans.items():
            for field in self.residuals(name):
                if (name, field) in mine:
                    mine[name, field].tensor.add_(_of(new_residual, mine[name, field]))
        return {name for (name, _), new_residual in orphans.items() if bool(new_residual.any())}

    def residuals(self, name: str) -> list[str]:
        """The field with the residual of a parameter: none, or one, the outermost of several."""
        fields = [field for each, field in self.layout if each == name and _last(field) == "residual"]
        return sorted(fields, key=len)[:1]


def _of(whole: Tensor, kept: StateSlice) -> Tensor:
    return whole[kept.start : kept.start + kept.tensor.numel()]


def _last(field: str) -> str:
    return field.rpartition(".")[2]


def is_topologys(field: str) -> bool:
    """Whether a state field belongs to the topology."""
    return field.startswith("topology.")


def _note(parts: dict[tuple[str, str], list[StateSlice | None]], by_rank: Sequence[Fields]) -> None:
    for key in dict.fromkeys(key for kept in by_rank for key in kept):
        parts[key] = [kept.get(key) for kept in by_rank]


def _spans(parts: Sequence[StateSlice | None]) -> Spans:
    """The span that each rank keeps; an empty one where it keeps nothing."""
    return tuple((0, 0) if part is None else (part.start, part.start + part.tensor.numel()) for part in parts)
