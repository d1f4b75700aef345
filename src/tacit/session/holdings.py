"""What a session travels in, and what it keeps: lots, this rank's pieces of them, and their states."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tacit.contracts import NODE, Collect, Context, Outcome, Place, Request, Spans, State, Topology, Transport
from tacit.lots import Kept, Lot, Policy, cut, make_lots, named_state, stretch_state
from tacit.transports.meter import Bill, Rehearsal, rehearse

Fields = dict[tuple[str, str], Kept]
"""(parameter, field) -> what is kept of it."""


@dataclass(frozen=True)
class Ground:
    """What stays when lots are cut anew.

    Attributes:
        tensors: the trainable parameters, by name.
    """

    topology: Topology
    transport: Transport
    tensors: Mapping[str, Tensor]
    policy: Policy

    @cached_property
    def ranks(self) -> list[int]:
        """The replicas that agree in a round."""
        return list(self.transport.ranks(self.topology.scope))

    @cached_property
    def me(self) -> int:
        """This rank's place among them."""
        return self.transport.place(self.topology.scope).rank

    @cached_property
    def here(self) -> Place:
        """This rank's place where compressors meet."""
        return self.transport.place(self.topology.meets)

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node share out what crosses between nodes."""
        return self.topology.scope != self.topology.meets

    @cached_property
    def near(self) -> Place:
        """This rank's place among those that share a lot out."""
        return self.transport.place(NODE) if self.by_node else Place()

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.tensors.values())


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
        words: for each lot, one number a replica, in which they tell of a NaN.
    """

    def __init__(self, ground: Ground, names: Sequence[Sequence[str]]) -> None:
        self._ground = ground
        self.lots = make_lots(names, ground.tensors, ground.policy)
        self._spans = [ground.topology.spans(lot.edges, ground.near) for lot in self.lots]
        self._pieces = [self._piece(*each) for each in zip(self.lots, self._spans, strict=True)]
        self._states: list[State] = [
            self._first_state(lot, piece, lot.device)
            for lot, piece in zip(self.lots, self._pieces, strict=True)
        ]
        rehearsals = [Rehearsal() for _ in self.lots]
        self.bills = [self._rehearse(*each) for each in zip(self.lots, self._spans, rehearsals, strict=True)]
        self._buffers = [Buffers(*each) for each in zip(self._pieces, self._states, rehearsals, strict=True)]
        self.words = [torch.zeros(len(ground.ranks)) for _ in self.lots]
        self._phases = [0 for _ in self.lots]

    def _piece(self, lot: Lot, spans: Spans, near: Place | None = None) -> Lot:
        """What a rank of the node, this one or `near`, hands to its compressor."""
        return lot.within(*spans[(near or self._ground.near).rank]) if len(spans) > 1 else lot

    def _first_state(self, lot: Lot, piece: Lot, device: torch.device | str = "meta") -> dict[str, Tensor]:
        """The compressor's, and what the topology keeps itself."""
        state = dict(piece.compressor.init(piece.like(device)))
        for field, (start, stop) in self._kept_by_topology(lot).items():
            state[field] = torch.zeros(stop - start, dtype=lot.dtype, device=device)
        return state

    # ---- exchanges ------------------------------------------------------------------------------------

    def talk(
        self, i: int, x: Tensor, total: Tensor | None, **moment: Any
    ) -> Generator[Request, Any, Outcome]:
        """The exchange of lot `i`; `moment` is what else its context says of when it takes place."""
        lot, ground = self.lots[i], self._ground
        self._enter_phase(i, moment["step"])
        ctx = self._context(lot, self._spans[i], x, self._buffers[i], ground.near, self.words[i])
        ctx = replace(ctx, total=total, share=lot.numel / ground.numel, **moment)
        return ground.topology.conduct(x, self._pieces[i].compressor, self._states[i], ctx)

    def _enter_phase(self, i: int, step: int) -> None:
        """Where payloads have other shapes from now on, take the bill and scratch memory anew."""
        lot = self.lots[i]
        phase = bisect_right(lot.compressor.changes, step)
        if phase != self._phases[i]:
            rehearsal = Rehearsal()
            self.bills[i] = self._rehearse(lot, self._spans[i], rehearsal, step=step)
            self._buffers[i].scratch_anew(lot.device, rehearsal)
            self._phases[i] = phase

    def _context(
        self, lot: Lot, spans: Spans, x: Tensor, work: Buffers | Rehearsal, near: Place, word: Tensor
    ) -> Context:
        """Where a payload could swallow a NaN, a word for each rank goes along."""
        rank, peers = self._ground.here
        return Context(
            out=x,
            work=work,
            peers=peers,
            rank=rank,
            near=near,
            spans=spans,
            word=word if lot.compressor.swallows else None,
            name=lot.name,
        )

    def _rehearse(
        self, lot: Lot, spans: Spans, rehearsal: Rehearsal, near: Place | None = None, step: int = 0
    ) -> Bill:
        ground, near = self._ground, near or self._ground.near
        piece = self._piece(lot, spans, near)
        state = self._first_state(lot, piece)
        x, word = lot.like(), torch.empty(len(ground.ranks), device="meta")
        ctx = replace(self._context(lot, spans, x, rehearsal, near, word), step=step)

        def place(axis: str) -> Place:
            return near if axis == NODE and ground.by_node else ground.transport.place(axis)

        outcome, bill = rehearse(ground.topology.conduct(x, piece.compressor, state, ctx), place)
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{piece.compressor} changes the shape of its state"
        return bill

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
        for lot in make_lots(largest, ground.tensors, ground.policy):
            all_to_one = ((0, lot.numel), *[(lot.numel, lot.numel)] * (ground.near.peers - 1))
            for step in (0, *lot.compressor.changes):
                near = Place(0, ground.near.peers)
                most |= self._rehearse(lot, all_to_one, Rehearsal(), near, step).stages
        most[ground.topology.scope] += 1
        return dict(most)

    def _kind(self, name: str) -> tuple[str, str]:
        tensor = self._ground.tensors[name]
        return str(tensor.dtype), str(tensor.device)

    def commit(self, outcomes: Mapping[int, Outcome]) -> None:
        """Keep the states that a round has led to."""
        for i, outcome in outcomes.items():
            old = self._states[i]
            self._states[i] = dict(outcome.state)
            for name, tensor in outcome.state.items():
                if tensor is self._buffers[i].spares.get(name):
                    self._buffers[i].spares[name] = old[name]

    # ---- state by parameter ---------------------------------------------------------------------------

    def _kept_by_topology(self, lot: Lot) -> Mapping[str, tuple[int, int]]:
        here = Place(self._ground.me, len(self._ground.ranks))
        return self._ground.topology.keeps(lot.numel, lot.compressor, here)

    def named_state(self) -> Fields:
        """All state that this rank keeps."""
        views: Fields = {}
        for lot, piece, state in zip(self.lots, self._pieces, self._states, strict=True):
            mine = self._kept_by_topology(lot)
            views |= named_state(piece, {field: t for field, t in state.items() if field not in mine})
            for field, span in mine.items():
                views |= stretch_state(lot.within(*span), field, state[field])
        return views

    @cached_property
    def layout(self) -> dict[tuple[str, str], list[Kept | None]]:
        """Who keeps what of each (parameter, field): by rank of the node, or of all for the topology's own.

        On meta tensors. Which pairs there are does not depend on how lots are cut.
        """
        ground = self._ground
        near = [Place(rank, ground.near.peers) for rank in range(ground.near.peers)]
        own = {f for lot in self.lots for c in lot.chosen for f in ground.topology.fields(c)}
        parts: dict[tuple[str, str], list[Kept | None]] = {}
        for lot, spans in zip(self.lots, self._spans, strict=True):
            pieces = [self._piece(lot, spans, place) for place in near]
            _note(parts, [named_state(piece, piece.compressor.init(piece.like())) for piece in pieces])
            for field in own:
                _note(parts, self._stretches(lot, field))
                for slot in lot.slots:
                    parts.setdefault((slot.name, field), [])
        return parts

    def _stretches(self, lot: Lot, field: str) -> list[Fields]:
        """What each replica keeps of a field of the topology's."""
        topology, peers = self._ground.topology, len(self._ground.ranks)
        kept = [topology.keeps(lot.numel, lot.compressor, Place(rank, peers)) for rank in range(peers)]
        stretches = [lot.within(*each.get(field, (0, 0))) for each in kept]
        return [stretch_state(each, field, each.like()) for each in stretches]

    def widths(self) -> dict[tuple[str, str], tuple[bool, int]]:
        """Of each (parameter, field) whether all ranks keep it in common, and its number of elements."""
        found = {}
        for (name, field), parts in self.layout.items():
            some = next((part for part in parts if part is not None), None)
            together = _is_topologys(field) or (some is not None and some.shared)
            found[name, field] = together, self._ground.tensors[name].numel() if some is None else some.width
        return found

    def gathered(self) -> Generator[Request, Any, Fields]:
        """All state of this rank's node, put together from what its ranks keep; the topology's, of all."""
        mine = self.named_state()
        whole: Fields = {}
        for key, (together, width) in self.widths().items():
            parameter = self._ground.tensors[key[0]]
            full = torch.zeros(width, dtype=parameter.dtype, device=parameter.device)
            if key in mine:
                full[mine[key].start : mine[key].start + mine[key].tensor.numel()] = mine[key].tensor
            if len(self.layout[key]) > 1:
                axis = self._ground.topology.scope if _is_topologys(key[1]) else NODE
                yield Collect(full, _spans(self.layout[key]), axis)
            whole[key] = Kept(full, together, 0, width)
        return whole

    def restore(self, whole: Mapping[tuple[str, str], Tensor]) -> None:
        """Take what is this rank's of the state that `gathered` gave, here or in another run.

        What the topology owed for a lot that it now treats otherwise, every rank owes.
        """
        mine = self.named_state()
        for key, kept in mine.items():
            if key in whole:
                kept.tensor.copy_(whole[key][kept.start : kept.start + kept.tensor.numel()])
        for key, parts in self.layout.items():
            if key in whole and _is_topologys(key[1]) and not any(parts):
                for (name, field), kept in mine.items():
                    if name == key[0] and field.endswith("residual"):
                        kept.tensor.add_(whole[key])


def _is_topologys(field: str) -> bool:
    return field.startswith("topology.")


def _note(parts: dict[tuple[str, str], list[Kept | None]], by_rank: Sequence[Fields]) -> None:
    for key in dict.fromkeys(key for kept in by_rank for key in kept):
        parts[key] = [kept.get(key) for kept in by_rank]


def _spans(parts: Sequence[Kept | None]) -> Spans:
    """The stretch of each rank; an empty one where it keeps nothing."""
    spans, at = [], 0
    for part in parts:
        stop = at if part is None else part.start + part.tensor.numel()
        spans.append((at, stop))
        at = stop
    return tuple(spans)
