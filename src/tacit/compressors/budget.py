"""Which part of a tensor travels in which round, so that all bytes together stay within a budget."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.cast import Cast
from tacit.compressors.dense import Dense
from tacit.compressors.mirrored import MARKS
from tacit.compressors.topk import TopK
from tacit.compressors.turns import at_random, by_layers, in_turn, places, size
from tacit.contracts import (
    Compressor,
    Context,
    Matrix,
    Mean,
    Reduce,
    Request,
    Together,
    refuse_overflow,
)
from tacit.errors import ConfigError
from tacit.kernels.positions import nbytes

DROP = 0.5
"""A learning rate that has fallen to this share of what it was asks for a round that sends everything."""

Subset: TypeAlias = Literal["rotating", "random", "layers", "magnitude"]
Heard: TypeAlias = Generator[Request, Any, tuple[Tensor, Tensor, Tensor]]
"""Gives (where, the mean there, what this rank gave there)."""


@dataclass(frozen=True)
class Budgeted(Compressor):
    """What is common to compressors that let the entries of a tensor take turns.

    In a round small parameters travel, and of the others as many entries as the budget leaves. `budget`
    counts all that travels, of what dense rounds after every step would: with b = budget x every, f the share
    of rounds that send everything, the last one of a training among them, and d that of the entries that
    always travel, the others have (b - f - (1 - f) d) / ((1 - f) (1 - d)). No index travels, as whose turn it
    is follows from seed and round.

    State, equal on all ranks: `rates`, by parameter, the learning rate of the last round, that of the last
    round that sent everything, and how many such there were for its sake.

    Attributes:
        budget: bytes, as a share of what a dense round after every step would send.
        subset: "rotating": of each of k equal stretches one entry, the next one in every round. "random": one
            of each stretch, whichever falls out. "layers": k entries side by side, layer after layer.
            "magnitude": the largest, of each rank its own, with their positions, so fewer; where a rank has
            not sent an entry that another has, it counts as 0.
        values: how entries are written: `BF16()` lets twice as many travel.
        full_steps: steps of the optimizer whose rounds send everything.
        drops: how many more rounds send everything, each behind one in which the learning rate was half of
            what it was at the last such round, or less.
        every: steps from round to round.
        horizon: how many steps the budget is for; a shorter training sends more than it.
        whole_below: parameters of fewer elements, and all of one dimension, travel in every round.
        share: of the entries that take turns, how many travel in a round; filled in when it is attached.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    budget: float = 0.11
    subset: Subset = "rotating"
    values: Dense | Cast = Dense()
    full_steps: int = 2
    drops: int = 0
    every: int = 1
    horizon: int = 100
    whole_below: int = 1024
    share: float | None = None
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        ratio.check(self.budget, "budget")
        checks.word("subset", self.subset, ("rotating", "random", "layers", "magnitude"))
        if not isinstance(self.values, Dense | Cast):
            raise ConfigError(f"values={self.values!r} is not possible: write Dense(), BF16() or FP16()")
        if self.subset == "magnitude" and self.values != Dense():
            raise ConfigError(
                f"values={self.values} with subset='magnitude' is not possible: leave it out, or write "
                "subset='rotating'"
            )
        checks.whole("full_steps", self.full_steps, 0, None, "2 are usual")
        hint = "write how many times the learning rate will be halved, or 0"
        checks.whole("drops", self.drops, 0, None, hint)
        checks.whole("every", self.every, 1, None, "write 1 for a round after every step")
        hint = "it is for how many steps the budget is, more than are sent in full"
        checks.whole("horizon", self.horizon, 1, None, hint)
        if self.full >= self.room < 1:
            raise ConfigError(
                f"budget={self.budget} is no more than what full_steps={self.full_steps}, drops={self.drops} "
                f"and the end send of horizon={self.horizon} steps, with a round every {self.every}: write a "
                "larger budget, or a longer horizon"
            )
        checks.whole("whole_below", self.whole_below, 1, None, "1024 is usual; 1 for none")
        if self.share is not None:
            ratio.check(self.share, "share")
        checks.matrices(self.matrices)

    @property
    def full(self) -> float:
        """f: the share of rounds that send everything; the end of a training is one."""
        return (self.full_steps + (self.drops + 1) * self.every) / self.horizon

    @property
    def room(self) -> float:
        """b: how many bytes a round may have on average, as a share of a dense one's."""
        return min(1.0, self.budget * self.every)

    @property
    def changes(self) -> tuple[int, ...]:
        """Where rounds no longer send everything."""
        return (self.full_steps,) if self.full_steps else ()

    def exempts(self, shape: torch.Size) -> bool:
        """None: small ones travel whole, but are counted."""
        return False

    def fitted(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same, which knows what the budget leaves for the entries that take turns.

        Raises:
            ConfigError: nothing is left.
        """
        n = sum(map(size, matrices))
        always = sum(size(m) for m in matrices if not self.takes_turns(m))
        if self.room < 1 and n and (self.full + (1 - self.full) * always / n) >= self.room:
            raise ConfigError(
                f"budget={self.budget} is used up before anything takes turns: {always:,} of {n:,} entries "
                f"always travel, and {self.full:.3f} of the rounds send everything. Write a larger budget, a "
                "longer horizon, or a smaller whole_below"
            )
        return replace(self, share=self._left(n, always))

    def bound(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same for these parameters."""
        return replace(self, matrices=matrices)

    # ---- who travels ----------------------------------------------------------------------------------

    @cached_property
    def turns(self) -> int:
        """k: how many entries travel by turns in a round."""
        n, rest = sum(map(size, self.matrices)), sum(map(size, self._taking_turns))
        if self.room == 1 or not rest:
            return rest
        share = self._left(n, n - rest) if self.share is None else self.share
        return min(rest, max(1, int(share * rest - MARKS / (1 - self.full) + 0.01)))

    def _left(self, n: int, always: int) -> float:
        """The share of entries taking turns that travels in a round, where so many of n always travel.

        Where these are all that the budget has room for, the others get as much as if there were none: other
        lots may be larger.
        """
        each = (self.room - self.full) / (1 - self.full) if self.full < self.room else 1.0
        if always >= n:
            return each
        left = (each * n - always) / (n - always)
        return left if left > 0 else each

    def travelling(self, full: bool, ctx: Context) -> Tensor:
        """The entries that travel in a round: all, or `positions`."""
        return places(self.matrices) if full else self.positions(ctx)

    def positions(self, ctx: Context) -> Tensor:
        """The entries that travel in a round in which not all do, rising; equal on all peers."""
        turning = self._taking_turns
        seed = zlib.crc32(f"{ctx.seed}|{ctx.name}|{ctx.prefix}|whose turn".encode())
        if self.subset == "layers":
            chosen = by_layers(turning, self._room, ctx.round)
        elif self.subset == "random":
            chosen = at_random(turning, self._room, zlib.crc32(f"{seed}|{ctx.round}".encode()))
        else:
            chosen = in_turn(turning, self._room, ctx.round, seed)
        return torch.cat((self._always, chosen)).sort().values

    @cached_property
    def _room(self) -> int:
        """How many entries travel in the bytes of `turns`."""
        most = sum(map(size, self._taking_turns))
        if self.subset == "magnitude":
            fit = bisect_right(range(most), 4 * self.turns, key=lambda k: 4 * k + nbytes(most, k)) - 1
            return max(1, fit)
        return min(most, self.turns * (2 if isinstance(self.values, Cast) else 1))

    @cached_property
    def _always(self) -> Tensor:
        return places([m for m in self.matrices if not self.takes_turns(m)])

    @property
    def _taking_turns(self) -> list[Matrix]:
        return [m for m in self.matrices if self.takes_turns(m)]

    def takes_turns(self, m: Matrix) -> bool:
        """Whether its entries do."""
        return m.dims > 1 and size(m) >= self.whole_below

    # ---- the conversation -----------------------------------------------------------------------------

    def heard(self, x: Tensor, full: bool, marks: Tensor, ctx: Context) -> Heard:
        """Average what travels in this round, and `marks` beside it."""
        by_size = self.subset == "magnitude" and not full and self.turns > 0
        return self._largest(x, marks, ctx) if by_size else self._chosen(x, full, marks, ctx)

    def _chosen(self, x: Tensor, full: bool, marks: Tensor, ctx: Context) -> Heard:
        """Average all entries, or those whose turn it is."""
        index = self.travelling(full, ctx).to(x.device)
        values = x[index]
        refuse_overflow(values, ctx)
        if full or isinstance(self.values, Dense):
            mine = values.clone()
            yield Mean((values, marks))
            return index, values, mine
        inside = ctx.inside("values", out=ctx.scratch("mean", x, values.shape, x.dtype))
        (mean, sent), _ = yield Together((Reduce(self.values, values, inside), Mean((marks,))))
        return index, mean, sent.dense(values)

    def _largest(self, x: Tensor, marks: Tensor, ctx: Context) -> Heard:
        """Average the largest entries of each rank, and those that always travel."""
        turning, always = places(self._taking_turns).to(x.device), self._always.to(x.device)
        values, small = x[turning], x[always]
        refuse_overflow(values, ctx)
        mine = small.clone()
        inside = ctx.inside("largest", out=ctx.scratch("mean", x, values.shape, x.dtype))
        largest = TopK(ratio=self._room / values.numel())
        (mean, sent), _ = yield Together((Reduce(largest, values, inside), Mean((small, marks))))
        if x.is_meta:
            return torch.cat((turning, always)), torch.cat((values, small)), torch.cat((values, mine))
        heard = mean.nonzero().squeeze(1)
        index, order = torch.cat((turning[heard], always)).sort()
        own = torch.cat((sent.dense(values)[heard], mine))
        return index, torch.cat((mean[heard], small))[order], own[order]

    # ---- when everything travels ----------------------------------------------------------------------

    def is_full(self, rates: Tensor, ctx: Context) -> bool:
        """Whether everything travels in this round."""
        return ctx.step < self.full_steps or self._dropped(rates)

    def _dropped(self, rates: Tensor) -> bool:
        """Whether the learning rate has fallen far since all was sent; as the last round heard from all."""
        if not self.drops or rates.is_meta or not rates.numel():
            return False
        last, then, count = rates[:3].tolist()
        return bool(count < self.drops and last <= DROP * then)

    def rates_after(self, rates: Tensor, heard: float, full: bool, ctx: Context) -> Tensor:
        """What is known of the learning rate after this round."""
        after = ctx.spare("rates", rates)
        if rates.is_meta or not rates.numel():
            return after.copy_(rates)
        _, then, count = rates[:3].tolist()
        late = full and ctx.step >= self.full_steps
        now = torch.tensor([heard, heard if full else max(then, heard), count + late])
        return after.copy_(now.repeat(len(rates) // 3))
