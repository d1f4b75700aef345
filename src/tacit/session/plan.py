"""How lots will travel, before any memory is spent on them: who shares what out, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.contracts import NODE, Context, Place, Spans, Topology, Transport, Workspace, state_dtype
from tacit.lots import Lot, Policy, make_lots
from tacit.transports.meter import Bill, Rehearsal, rehearse


class Spot(NamedTuple):
    """A rank's place among those that share a lot out, and where compressors meet."""

    near: Place
    here: Place


@dataclass(frozen=True)
class Ground:
    """What stays when lots are cut anew.

    Attributes:
        tensors: the trainable parameters, by name.
        idle: tells whether a parameter took no part in this rank's backward, where what the ranks agree on
            for it is applied only if it did on some rank. None: all is applied.
        seed: part of every random draw.
        device: where lots are exchanged; None: where the parameters are.
        in_stream: whether they are exchanged on a device that the host does not wait for.
    """

    topology: Topology
    transport: Transport
    tensors: Mapping[str, Tensor]
    policy: Policy
    idle: Callable[[str], bool] | None = None
    seed: int = 0
    device: torch.device | None = None
    in_stream: bool = False

    @cached_property
    def ranks(self) -> list[int]:
        """The replicas that agree in a round."""
        return list(self.transport.ranks(self.topology.scope))

    @cached_property
    def me(self) -> int:
        """This rank's place among them."""
        return self.transport.place(self.topology.scope).rank

    @property
    def by_node(self) -> bool:
        """Whether the ranks of a node share out what crosses between nodes."""
        return self.topology.scope != self.topology.meets

    @cached_property
    def spots(self) -> list[Spot]:
        """Those of the replicas that agree in a round."""
        if not self.by_node:
            return [Spot(Place(), Place(rank, len(self.ranks))) for rank in range(len(self.ranks))]
        nodes = self.transport.nodes
        where = {
            rank: Spot(Place(i, len(node)), Place(m, len(nodes)))
            for m, node in enumerate(nodes)
            for i, rank in enumerate(node)
        }
        return [where[rank] for rank in self.ranks]

    @property
    def spot(self) -> Spot:
        """This rank's."""
        return self.spots[self.me]

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.tensors.values())


class Plan:
    """Lots, and which stretch of each a rank of the node hands to its compressor.

    Args:
        all_to_one: the first rank of a node takes everything, whatever the topology says.
    """

    def __init__(self, ground: Ground, names: Sequence[Sequence[str]], all_to_one: bool = False) -> None:
        self.ground = ground
        self.lots = make_lots(names, ground.tensors, ground.policy, ground.device)
        others = ground.spot.near.peers - 1
        self.spans: list[Spans] = [
            ((0, lot.numel), *[(lot.numel, lot.numel)] * others)
            if all_to_one
            else ground.topology.spans(lot.edges, ground.spot.near)
            for lot in self.lots
        ]

    def piece(self, i: int, near: Place) -> Lot:
        """What the rank `near` of the node hands to its compressor of lot `i`."""
        lot, spans = self.lots[i], self.spans[i]
        return lot.within(*spans[near.rank]) if len(spans) > 1 else lot

    def keeps(self, i: int, spot: Spot) -> Mapping[str, tuple[int, int]]:
        """What the topology keeps there: field -> the stretch of the piece that it is about."""
        piece = self.piece(i, spot.near)
        return self.ground.topology.keeps(piece.numel, piece.compressor, spot.here)

    def first_state(self, i: int, spot: Spot, device: torch.device | str = "meta") -> dict[str, Tensor]:
        """The compressor's, and what the topology keeps itself."""
        piece = self.piece(i, spot.near)
        state = dict(piece.compressor.init(piece.like(device)))
        for field, (start, stop) in self.keeps(i, spot).items():
            state[field] = torch.zeros(stop - start, dtype=state_dtype(piece.dtype), device=device)
        return state

    def context(self, i: int, spot: Spot, x: Tensor, work: Workspace, word: Tensor, **moment: Any) -> Context:
        """Where a payload could swallow a NaN, or parameters may be idle, `word` goes along.

        `moment`: what else there is to be told of when it takes place.
        """
        lot = self.lots[i]
        speaks = lot.compressor.swallows or self.ground.topology.apart or self.tells_of_idle(i)
        return Context(
            out=x,
            work=work,
            peers=spot.here.peers,
            rank=spot.here.rank,
            near=spot.near,
            spans=self.spans[i],
            word=word if speaks else None,
            replicas=len(self.ground.ranks),
            name=lot.name,
            seed=self.ground.seed,
            **moment,
        )

    def tells_of_idle(self, i: int) -> bool:
        """Whether the ranks must know which parameters were idle on all of them: where something is kept."""
        return self.ground.idle is not None and bool(self.first_state(i, self.ground.spot))

    def word(self, i: int, device: torch.device | str = "cpu") -> Tensor:
        """A number a rank, in which they tell of a NaN, and perhaps one a parameter: whether it was idle.

        Where exchanges are not waited for, one more a rank, in which they tell of what overflowed on the way.
        """
        slots = len(self.lots[i].slots) if self.tells_of_idle(i) else 0
        ranks = len(self.ground.ranks)
        return torch.zeros(ranks + slots + ranks * self.ground.in_stream, device=device)

    def rehearse(self, i: int, rehearsal: Rehearsal, spot: Spot | None = None, step: int = 0) -> Bill:
        """What an exchange of lot `i` costs the rank there, this one or another; on meta tensors."""
        ground, spot = self.ground, spot or self.ground.spot
        lot, compressor = self.lots[i], self.piece(i, spot.near).compressor
        state, x = self.first_state(i, spot), lot.like()
        ctx = replace(self.context(i, spot, x, rehearsal, self.word(i, "meta")), step=step)

        def place(axis: str) -> Place:
            if axis == ground.topology.meets:
                return spot.here
            return spot.near if axis == NODE and ground.by_node else ground.transport.place(axis)

        outcome, bill = rehearse(ground.topology.conduct(x, compressor, state, ctx), place)
        before, after = ({k: v.shape for k, v in each.items()} for each in (state, outcome.state))
        assert before == after, f"{compressor} changes the shape of its state"
        return bill
