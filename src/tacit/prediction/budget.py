"""Which entries are sent in which round, so that all bytes together stay within a budget."""

from __future__ import annotations

import logging
import zlib
from bisect import bisect_right
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.cast import BF16, FP16, Cast
from tacit.compressors.dense import Dense
from tacit.compressors.topk import TopK
from tacit.contracts import (
    AllReduce,
    Compressor,
    Context,
    Grouped,
    Matrix,
    ReduceEncoded,
    Request,
    ScheduleState,
)
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.payload_layout import position_bytes
from tacit.prediction.agreement_check import MARKS
from tacit.prediction.sent_subsets import at_random, by_layers, drawn_others, in_turn, placed, places, size

_log = logging.getLogger("tacit")

DEFAULT_HORIZON = 100
"""The default number of steps that a budget is for."""
DRAWN = 16
"""One in this many entries of a round is drawn at random, where predictions are evaluated."""
DROP = 0.5
"""A round sends everything when the learning rate has fallen to this share of its last value."""

Subset: TypeAlias = Literal["rotating", "random", "layers", "magnitude"]
Answered: TypeAlias = Generator[Request, Any, tuple[Tensor, Tensor, Tensor, Tensor]]
"""Returns (positions, mean there, this rank's values there, which drawn entries stand for those not sent)."""


class SentEntries(NamedTuple):
    """Which entries are sent in a round, rising.

    Attributes:
        full: whether all entries are sent.
        where: the positions of all that are sent.
        drawn: of these, those drawn at random from all that are not selected in this round. They were last
            sent as long ago as the entries that are not sent, so the error measured on them holds for those
            too.
    """

    full: bool
    where: Tensor
    drawn: Tensor


@dataclass(frozen=True)
class Budgeted(Compressor):
    """Base of compressors that send a different subset of the entries in each round.

    In a round small parameters are sent, and of the others as many entries as the budget leaves. `budget`
    counts all that is sent, of what dense rounds after every step would: with b = budget x every, f the share
    of rounds that send everything, the last one of a training among them, and d that of the entries that
    are always sent, the others have (b - f - (1 - f) d) / ((1 - f) (1 - d)). No index is sent, as the
    selection follows from seed and round.

    State, equal on all ranks: `rates`, by parameter, the learning rate of the last round, that of the last
    round that sent everything, and how many such rounds `drops` has caused.

    Attributes:
        budget: bytes, as a share of what a dense round after every step would send.
        subset: "rotating": of each of k equal spans one entry, the next one in every round. "random": one
            of each span, at random. "layers": k adjacent entries, layer after layer.
            "magnitude": the largest of each rank, with their positions, so fewer; an entry that a rank has
            not sent and another has counts as 0.
        values: how entries are encoded: `BF16()` sends twice as many.
        full_steps: steps of the optimizer whose rounds send everything.
        drops: how many more rounds send everything, each after one in which the learning rate was half of
            what it was at the last such round, or less.
        every: steps from round to round.
        horizon: the number of steps that the budget is for. None: `steps_per_epoch` times `epochs` of
            `attach`, or 100. A longer training stays within the budget. A shorter one sends more, and the log
            says so.
        whole_below: parameters of fewer elements, and all of one dimension, are sent in every round.
        share: of the entries sent in rotation, the share sent in a round; filled in when it is attached.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    budget: float = 0.11
    subset: Subset = "rotating"
    values: Dense | Cast = Dense()
    full_steps: int = 2
    drops: int = 0
    every: int = 1
    horizon: int | None = None
    whole_below: int = 1024
    share: float | None = None
    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        ratio.check(self.budget, "budget")
        checks.one_of("subset", self.subset, ("rotating", "random", "layers", "magnitude"))
        if self.values not in (Dense(), BF16(), FP16()):
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
        hint = "it is the number of steps of the budget, more than are sent in full"
        if self.horizon is not None:
            checks.whole("horizon", self.horizon, 1, None, hint)
        if not self._can_be_kept_in(self.planned):
            raise ConfigError(
                f"budget={self.budget} is no more than what full_steps={self.full_steps}, drops={self.drops} "
                f"and the end send of horizon={self.planned} steps, with a round every {self.every}: write a "
                "larger budget, or a longer horizon"
            )
        checks.whole("whole_below", self.whole_below, 1, None, "1024 is usual; 1 for none")
        if self.share is not None:
            ratio.check(self.share, "share")
        checks.matrices(self.matrices)

    @property
    def planned(self) -> int:
        """The number of steps that the budget is for."""
        return DEFAULT_HORIZON if self.horizon is None else self.horizon

    @property
    def full(self) -> float:
        """f: the share of rounds that send everything, with the last round of a training."""
        return self._full_of(self.planned)

    def _full_of(self, steps: int) -> float:
        return (self.full_steps + (self.drops + 1) * self.every) / steps

    def _can_be_kept_in(self, steps: int) -> bool:
        """Whether rounds that send everything leave a part of the budget, in this number of steps."""
        return self.room == 1 or self._full_of(steps) < self.room

    @property
    def room(self) -> float:
        """b: the bytes that a round may have on average, as a share of a dense one's."""
        return min(1.0, self.budget * self.every)

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps after which rounds no longer send everything."""
        return (self.full_steps,) if self.full_steps else ()

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: small ones are sent in full, but counted."""
        return False

    def for_training(self, schedule_state: ScheduleState) -> Compressor:
        """The same for the number of steps of the training, if known and `horizon` is None."""
        if self.horizon is not None or not {"steps_per_epoch", "epochs"} <= schedule_state.keys():
            return self
        steps = int(schedule_state["steps_per_epoch"] * schedule_state["epochs"])
        if self._can_be_kept_in(steps):
            return replace(self, horizon=steps)
        _log.warning(
            "budget=%g cannot be kept in %d steps, as rounds that send everything take all of it: more will "
            "be sent, as if it were the beginning of %d steps. Write full_steps=0 (mp2: full_rounds=0), or a "
            "larger budget",
            *(self.budget, steps, DEFAULT_HORIZON),
        )
        return self

    def ended(self, steps: int) -> str:
        """A warning if a training that ends early has sent more than the budget."""
        full = self.full_steps + self.every  # the first rounds, and the end
        partly = max(0, steps - self.full_steps) * self._each / self.every
        sent = (min(full, steps + self.every) / self.every + partly) / max(steps, 1)
        if self.room == 1 or steps >= self.planned or sent <= 1.01 * self.budget:
            return ""
        return (
            f"the budget was for {self.planned} steps, and training ended after {steps}: about {sent:.1%} of "
            f"dense rounds' bytes were sent, where budget={self.budget:g}. Give attach steps_per_epoch and "
            f"epochs, or write horizon={steps}"
        )

    def for_model(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same, with the share of entries per round that the budget leaves.

        Raises:
            ConfigError: nothing is left.
        """
        n = sum(map(size, matrices))
        always = sum(size(m) for m in matrices if not self.takes_turns(m))
        if self.room < 1 and n and (self.full + (1 - self.full) * always / n) >= self.room:
            raise ConfigError(
                f"budget={self.budget} is too small: {always:,} of {n:,} entries always travel (vectors, and "
                f"parameters of fewer than {self.whole_below:,}), and {self.full:.3f} of the rounds send "
                "everything. Write a larger budget or a longer horizon; or, for a model of small parameters, "
                "'lowbit', which sends every entry in a few bits"
            )
        return replace(self, share=_left(self._each, n, always))

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same with these parameters as `matrices`."""
        return replace(self, matrices=matrices)

    @property
    def judges(self) -> bool:
        """Whether some entries are drawn at random in every round, to evaluate predictions."""
        return False

    # ---- which entries are sent -----------------------------------------------------------------------

    @cached_property
    def turns(self) -> int:
        """k: the number of entries that are sent in rotation in a round."""
        n, rest = sum(map(size, self.matrices)), sum(map(size, self._taking_turns))
        if self.room == 1 or not rest:
            return rest
        share = _left(self._each, n, n - rest) if self.share is None else self.share
        return min(rest, max(1, int(share * rest - MARKS / (1 - self.full) + 0.01)))

    @property
    def _each(self) -> float:
        """The bytes of a round that does not send everything, as a share of a dense one's."""
        return (self.room - self.full) / (1 - self.full) if self.full < self.room else 1.0

    def entries_of_round(self, full: bool, ctx: Context) -> SentEntries:
        """The entries of a round that sends everything (`full`) or not; equal on all peers."""
        always = zlib.crc32(f"{ctx.seed}|{ctx.name}|{ctx.prefix}|whose turn".encode())
        now = zlib.crc32(f"{always}|{ctx.round}".encode())
        chosen = torch.empty(0, dtype=torch.int64)
        if not full:
            count = self._room - self._drawn
            chosen = _rotated(self.subset, self._turning, count, ctx.round, always, now)
        drawn = drawn_others(self._turning, self._drawn, chosen, zlib.crc32(f"{now}|drawn".encode()))
        if full:
            return SentEntries(True, places(self.matrices), placed(self._taking_turns, drawn))
        both = placed(self._taking_turns, torch.cat((chosen, drawn)))
        return SentEntries(False, torch.cat((self._always, both)).sort().values, both[len(chosen) :])

    @cached_property
    def _room(self) -> int:
        """The number of entries in the bytes of `turns`, with those that are drawn."""
        return min(self._turning, self.turns * (1 if self.values == Dense() else 2))

    @cached_property
    def _turning(self) -> int:
        """The number of entries that are sent in rotation."""
        return sum(map(size, self._taking_turns))

    @cached_property
    def _drawn(self) -> int:
        """The number of sent entries that are drawn at random from those not selected."""
        if not self.judges:
            return 0
        return max(0, min(self._turning - self._room, self._room - 1, -(-self._room // DRAWN)))

    @cached_property
    def _always(self) -> Tensor:
        return places([m for m in self.matrices if not self.takes_turns(m)])

    @property
    def _taking_turns(self) -> list[Matrix]:
        return [m for m in self.matrices if self.takes_turns(m)]

    def takes_turns(self, m: Matrix) -> bool:
        """Whether the entries of this parameter are sent in rotation."""
        return m.dims > 1 and size(m) >= self.whole_below

    # ---- the exchange ---------------------------------------------------------------------------------

    def averaged(self, x: Tensor, selected: SentEntries, marks: Tensor, ctx: Context) -> Answered:
        """Average the entries of this round, and `marks` with them."""
        if self.subset != "magnitude" or selected.full or not self.turns:
            return _selected_mean(self.values, x, selected, marks, ctx)
        most = _largest_within(4 * (self.turns - self._drawn), self._turning)
        return _largest_mean(most, places(self._taking_turns), x, selected, marks, ctx)

    # ---- rounds that send everything ------------------------------------------------------------------

    def is_full(self, rates: Tensor, ctx: Context) -> bool:
        """Whether everything is sent in this round."""
        return ctx.step < self.full_steps or _dropped(rates, self.drops)

    def rates_after(self, rates: Tensor, heard: float, full: bool, ctx: Context) -> Tensor:
        """The state field `rates` after this round."""
        after = ctx.spare("rates", rates)
        if rates.is_meta or not rates.numel():
            return after.copy_(rates)
        _, then, count = rates[:3].tolist()
        late = full and ctx.step >= self.full_steps
        now = torch.tensor([heard, heard if full else max(then, heard), count + late], dtype=torch.float32)
        return after.copy_(now.repeat(len(rates) // 3))


def _left(each: float, n: int, always: int) -> float:
    """The share of rotating entries that is sent in a round, if `always` of n are always sent.

    If these need all that the round may send (`each`, as a share of a dense one's bytes), the others get as
    much as if there were none, as other buckets may be larger.
    """
    if always >= n:
        return each
    left = (each * n - always) / (n - always)
    return left if left > 0 else each


def _rotated(subset: Subset, total: int, count: int, round_: int, always: int, now: int) -> Tensor:
    """This round's rotating entries, by their number among all of these. Seeds: the bucket's, the round's."""
    if subset == "layers":
        return by_layers(total, count, round_)
    if subset == "random":
        return at_random(total, count, now)
    if subset == "magnitude":
        return torch.empty(0, dtype=torch.int64)
    return in_turn(total, count, round_, always)


def _largest_within(room: int, of: int) -> int:
    """The number of largest entries that fit into `room` bytes with their positions."""
    return max(1, bisect_right(range(of), room, key=lambda k: 4 * k + position_bytes(of, k)) - 1)


def _dropped(rates: Tensor, drops: int) -> bool:
    """Whether the learning rate has fallen far since everything was sent, by the mean of the last round."""
    if not drops or rates.is_meta or not rates.numel():
        return False
    last, then, count = rates[:3].tolist()
    return bool(count < drops and last <= DROP * then)


def _selected_mean(
    codec: Dense | Cast, x: Tensor, selected: SentEntries, marks: Tensor, ctx: Context
) -> Answered:
    """Average all entries, or those whose turn it is."""
    index, drawn = selected.where.to(x.device), selected.drawn.to(x.device)
    values = x[index]
    refuse_overflow(values, ctx)
    if selected.full or codec == Dense():
        mine = values.clone()
        yield Grouped((AllReduce((values,)), AllReduce((marks,))))
        return index, values, mine, drawn
    inside = ctx.inside("values", out=ctx.scratch("mean", x, values.shape, x.dtype))
    (mean, sent), _ = yield Grouped((ReduceEncoded(codec, values, inside), AllReduce((marks,))))
    return index, mean, sent.dense(values), drawn


def _largest_mean(
    most: int, turning: Tensor, x: Tensor, selected: SentEntries, marks: Tensor, ctx: Context
) -> Answered:
    """Average the `most` largest of the entries at `turning`, and those that are always sent."""
    turning, index, drawn = turning.to(x.device), selected.where.to(x.device), selected.drawn
    values, small = x[turning], x[index]
    refuse_overflow(values, ctx)
    mine = small.clone()
    inside = ctx.inside("largest", out=ctx.scratch("mean", x, values.shape, x.dtype))
    largest = TopK(ratio=most / values.numel())
    (mean, sent), *_ = yield Grouped(
        (ReduceEncoded(largest, values, inside), AllReduce((small,)), AllReduce((marks,)))
    )
    if x.is_meta:
        return torch.cat((turning, index)), torch.cat((values, small)), torch.cat((values, mine)), drawn
    large = mean != 0
    arrived = (large & ~torch.isin(turning, index, assume_unique=True)).nonzero().squeeze(1)
    where, order = torch.cat((turning[arrived], index)).sort()
    own = torch.cat((sent.dense(values)[arrived], mine))
    # Large entries are not predicted, so predictions are not judged by them either.
    drawn = drawn[~torch.isin(drawn, turning[large], assume_unique=True)]
    return where, torch.cat((mean[arrived], small))[order], own[order], drawn
