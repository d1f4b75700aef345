"""What a session travels in, and what it keeps: lots, this rank's pieces of them, and their states."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import NODE, Collect, Outcome, Place, Request, Spans, State, state_dtype
from tacit.lots import Kept, Lot, cut, named_state, stretch_state
from tacit.session.plan import Ground, Plan, Spot
from tacit.transports.meter import Rehearsal

Fields = dict[tuple[str, str], Kept]
"""(parameter, field) -> what is kept of it."""


class Buffers:
    """A lot's second state buffers and scratch memory, allocated at attach as the rehearsal asked."""

    def __init__(self, lot: Lot, state: State, rehearsal: Rehearsal) -> None:
        self.spares = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.scratch_anew(lot.device, rehearsal)

    def scratch_anew(self, device: torch.device, rehearsal: Rehearsal) -> None:
        """Allocate scratch memory as another rehearsal asked."""
        self._scratch = {
            key: torch.empty(shape, dtype=dtype, device=device)
            for key, (shape, dtype) in rehearsal.scratched.items()
        }

    def spare(self, field: str, like: Tensor) -> Tensor:
        """See `contracts.Workspace`."""
        return self.spares[field]

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `contracts.Workspace`."""
        return self._scratch[key]


class Holdings:
    """Lots and their states, as they are first; made by rehearsing one exchange of every lot on meta tensors.

    Attributes:
        bills: what a round of each lot costs.
        words: for each lot, one number a replica, in which they tell of a NaN; see `Plan.word`.
    """

    def __init__(self, ground: Ground, names: Sequence[Sequence[str]]) -> None:
        self._ground = ground
        self._plan = plan = Plan(ground, names)
        self.lots = plan.lots
        each = range(len(self.lots))
        self._pieces = [plan.piece(i, ground.spot.near) for i in each]
        self._states: list[State] = [
            plan.first_state(i, ground.spot, lot.device) for i, lot in enumerate(self.lots)
        ]
        rehearsals = [Rehearsal() for _ in each]
        self.bills = [plan.rehearse(i, rehearsals[i]) for i in each]
        self._buffers = [Buffers(*each) for each in zip(self._pieces, self._states, rehearsals, strict=True)]
        self.words = [
            plan.word(i, lot.device if ground.in_stream else "cpu") for i, lot in enumerate(self.lots)
        ]
        self._phases = [0 for _ in each]

    # ---- exchanges ------------------------------------------------------------------------------------

    def talk(
        self, i: int, x: Tensor, total: Tensor | None = None, **moment: Any
    ) -> Generator[Request, Any, Outcome]:
        """The exchange of lot `i`; `moment` is what else its context says of when it takes place."""
        lot, ground = self.lots[i], self._ground
        self._enter_phase(i, moment["step"])
        share = lot.numel / ground.numel
        moment = {**moment, "total": total, "share": share}
        ctx = self._plan.context(i, ground.spot, x, self._buffers[i], self.words[i], **moment)
        return ground.topology.conduct(x, self._pieces[i].compressor, self._states[i], ctx)

    def _enter_phase(self, i: int, step: int) -> None:
        """Where payloads have other shapes from now on, take the bill and scratch memory anew."""
        lot = self.lots[i]
        phase = bisect_right(lot.compressor.changes, step)
        if phase != self._phases[i]:
            rehearsal = Rehearsal()
            self.bills[i] = self._plan.rehearse(i, rehearsal, step=step)
            self._buffers[i].scratch_anew(lot.device, rehearsal)
            self._phases[i] = phase

    @property
    def stages(self) -> dict[str, int]:
        """How many times the longest exchange speaks on each axis, and once more after a NaN.

        As lots are cut, and as they would be were they as large as can be; in all phases.
        """
        ground = self._ground
        most: Counter[str] = Counter()
        for bill in self.bills:
            most |= bill.stages
        names = [slot.name for lot in self.lots for slot in lot.slots]
        largest = cut(sorted(names, key=self._kind), ground.tensors, cap=sys.maxsize)
        plan, first = Plan(ground, largest, all_to_one=True), Place(0, ground.spot.near.peers)
        for i, lot in enumerate(plan.lots):
            for step in (0, *lot.compressor.changes):
                most |= plan.rehearse(i, Rehearsal(), Spot(first, ground.spot.here), step).stages
        most[ground.topology.scope] += 1
        return dict(most)

    def _kind(self, name: str) -> tuple[str, str]:
        tensor = self._ground.tensors[name]
        return str(tensor.dtype), str(tensor.device)

    def commit(self, outcomes: Mapping[int, Outcome], idle: Set[str] = frozenset()) -> None:
        """Keep the states that a round has led to; of parameters that were `idle`, what was kept before."""
        for i, outcome in outcomes.items():
            old = self._states[i]
            if not idle.isdisjoint(self.lots[i].names):
                self._keep(i, old, outcome.state, idle)
            self._states[i] = dict(outcome.state)
            for name, tensor in outcome.state.items():
                if tensor is self._buffers[i].spares.get(name):
                    self._buffers[i].spares[name] = old[name]

    def _keep(self, i: int, old: State, new: State, idle: Set[str]) -> None:
        """DDP throws the answer for these away, so that nothing of their state may have changed."""
        before, after = self._views(i, old), self._views(i, new)
        for key, kept in after.items():
            if key[0] in idle and kept.tensor.data_ptr() != before[key].tensor.data_ptr():
                kept.tensor.copy_(before[key].tensor)

    # ---- state by parameter ---------------------------------------------------------------------------

    def named_state(self) -> Fields:
        """All state that this rank keeps."""
        views: Fields = {}
        for i, state in enumerate(self._states):
            views |= self._views(i, state)
        return views

    def _views(self, i: int, state: State) -> Fields:
        piece, mine = self._pieces[i], self._plan.keeps(i, self._ground.spot)
        views = named_state(piece, {field: t for field, t in state.items() if field not in mine})
        for field, span in mine.items():
            views |= stretch_state(piece, span, field, state[field])
        return views

    @cached_property
    def layout(self) -> dict[tuple[str, str], list[Kept | None]]:
        """Who keeps what of each (parameter, field): by rank of the node, or of all for the topology's own.

        On meta tensors. Which pairs there are does not depend on how lots are cut.
        """
        ground = self._ground
        near = [Place(rank, ground.spot.near.peers) for rank in range(ground.spot.near.peers)]
        parts: dict[tuple[str, str], list[Kept | None]] = {}
        for i, lot in enumerate(self.lots):
            pieces = [self._plan.piece(i, place) for place in near]
            _note(parts, [named_state(piece, piece.compressor.init(piece.like())) for piece in pieces])
            for slot, compressor in zip(lot.slots, lot.chosen, strict=True):
                parts |= {(slot.name, field): [] for field in ground.topology.fields(compressor)}
            _note(parts, [self._stretches(i, spot) for spot in ground.spots])
        return parts

    def _stretches(self, i: int, spot: Spot) -> Fields:
        """What the topology keeps there, of lot `i`."""
        piece, found = self._plan.piece(i, spot.near), Fields()
        for field, (start, stop) in self._plan.keeps(i, spot).items():
            meta = torch.empty(stop - start, dtype=state_dtype(piece.dtype), device="meta")
            found |= stretch_state(piece, (start, stop), field, meta)
        return found

    def widths(self) -> dict[tuple[str, str], tuple[bool, int]]:
        """Of each (parameter, field) whether all ranks keep it in common, and its number of elements."""
        found = {}
        for (name, field), parts in self.layout.items():
            some = next((part for part in parts if part is not None), None)
            together = is_topologys(field) or (some is not None and some.shared)
            found[name, field] = together, self._ground.tensors[name].numel() if some is None else some.width
        return found

    def gathered(self) -> Generator[Request, Any, Fields]:
        """All state of this rank's node, put together from what its ranks keep; the topology's, of all."""
        mine = self.named_state()
        whole: Fields = {}
        for key, (together, width) in self.widths().items():
            device = self._ground.device or self._ground.tensors[key[0]].device
            full = torch.zeros(width, dtype=self._dtype(key), device=device)
            if key in mine:
                full[mine[key].start : mine[key].start + mine[key].tensor.numel()] = mine[key].tensor
            if len(self.layout[key]) > 1:
                axis = self._ground.topology.scope if is_topologys(key[1]) else NODE
                yield Collect(full, _spans(self.layout[key]), axis)
            whole[key] = Kept(full, together, 0, width)
        return whole

    def _dtype(self, key: tuple[str, str]) -> torch.dtype:
        """The type of a field, wherever it is kept; where it is kept nowhere, of what would be there."""
        kept = next((part.tensor.dtype for part in self.layout[key] if part is not None), None)
        return kept or state_dtype(self._ground.tensors[key[0]].dtype)

    def restore(self, whole: Mapping[tuple[str, str], Tensor]) -> set[str]:
        """Take what is this rank's of the state that `gathered` gave, here or in another run.

        What the topology owed for a parameter of which it now keeps nothing, every rank owes: the mean of
        what is owed stays the same. Returns the parameters of which that was more than zeros.
        """
        mine = self.named_state()
        for key, kept in mine.items():
            if key in whole:
                kept.tensor.copy_(_of(whole[key], kept))
        orphans = {
            key: owed
            for key, owed in whole.items()
            if is_topologys(key[1]) and not any(self.layout.get(key, ()))
        }
        for (name, _), owed in orphans.items():
            for field in self.residuals(name):
                if (name, field) in mine:
                    mine[name, field].tensor.add_(_of(owed, mine[name, field]))
        return {name for (name, _), owed in orphans.items() if bool(owed.any())}

    def residuals(self, name: str) -> list[str]:
        """The field in which ranks owe of a parameter; none, or one: of several the outermost."""
        fields = [field for each, field in self.layout if each == name and _last(field) == "residual"]
        return sorted(fields, key=len)[:1]


def _of(whole: Tensor, kept: Kept) -> Tensor:
    return whole[kept.start : kept.start + kept.tensor.numel()]


def _last(field: str) -> str:
    return field.rpartition(".")[2]


def is_topologys(field: str) -> bool:
    """Whether a state field is the topology's own."""
    return field.startswith("topology.")


def _note(parts: dict[tuple[str, str], list[Kept | None]], by_rank: Sequence[Fields]) -> None:
    for key in dict.fromkeys(key for kept in by_rank for key in kept):
        parts[key] = [kept.get(key) for kept in by_rank]


def _spans(parts: Sequence[Kept | None]) -> Spans:
    """The stretch of each rank; an empty one where it keeps nothing."""
    return tuple((0, 0) if part is None else (part.start, part.start + part.tensor.numel()) for part in parts)
