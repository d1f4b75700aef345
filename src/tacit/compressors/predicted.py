"""Progress of which a part is sent and the rest predicted, alike on all ranks (MP²: Liu et al. 2024)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.compressors.turns import in_turn, places, size
from tacit.contracts import (
    Compressor,
    Context,
    Exchange,
    Matrix,
    Mean,
    Outcome,
    Sent,
    State,
    refuse_overflow,
)
from tacit.errors import ConfigError, RoundError
from tacit.predictors import Predictor, Stale, kind_of

PIECE = 8192
"""Elements that are predicted at a time: what they take then stays in a core's cache."""
MARKS = 2
"""Numbers by which ranks see that their histories are equal; they ride in the message."""


@dataclass(frozen=True)
class Predicted(Compressor):
    """Average a moving subset of the entries, and predict the others by the same function on every rank.

    In a round of n entries, of which w travel in all of them and k take turns:

        S     <- the w, and one of each of k equal stretches of the others; the next one in every round
        a     <- mean of x over S                                    2 (P - 1) / P x (w + k + 2) x b bytes
        p     <- shrink x predictor(the last `depth` answers, a layer's mean of a); 0 before there are so many
        result: a on S, p elsewhere

    No index travels, as whose turn it is follows from seed and round; nor a prediction, as its inputs are
    equal on all ranks, and so are its bits: in every round ranks compare a checksum of the last answer.

    What a rank's own x was where it has not been sent is lost, as in the paper. `ErrorFeedback` around this
    would owe it, which with momentum in the optimizer lets it be applied twice, and diverges.

    `budget` counts all that travels in a lot: k is what it leaves room for beside the w, the checksum, and
    the rounds of the first `full_steps` steps, spread over `horizon`. A lot of which the w alone are more
    sends them, and the same share of the others: more than the budget, and no error, as other lots may be
    larger.

    State, equal on all ranks: `past0` and so on, the last answers, in turn; `faults`, for how many rounds
    in a row the predictor was worse than no change, by parameter. That is seen on S, where both are known; it
    says nothing of where many predictions lead, one upon the other.

    Attributes:
        budget: bytes, as a share of what dense rounds would send. Less says less, and predicts more.
        predictor: what tells the next change; `Stale` leaves at rest what is not sent.
        shrink: what predictions are multiplied by, in (0, 1]. Less trusts them less.
        full_steps: steps of the optimizer whose rounds send everything.
        horizon: how many steps the budget is for; a shorter training sends more than it.
        whole_below: parameters of fewer elements, and all of one dimension, travel in every round.
        patience: after so many rounds worse than no change in a row a parameter is not predicted, until it
            would have been better again.
        matrices: where the parameters lie in the flat tensor; filled in when it is attached.
    """

    budget: float = 0.11
    predictor: Predictor = Stale()
    shrink: float = 1.0
    full_steps: int = 2
    horizon: int = 1000
    whole_below: int = 1024
    patience: int = 3
    matrices: tuple[Matrix, ...] = ()

    shared: ClassVar[frozenset[str]] = frozenset({"faults", *(f"past{i}" for i in range(Predictor.depth))})

    def __post_init__(self) -> None:
        ratio.check(self.budget, "budget")
        if not isinstance(self.predictor, Predictor):
            raise ConfigError(
                f"predictor={self.predictor!r} is no Predictor: write Stale(), Linear() or MP2()"
            )
        checks.real("shrink", self.shrink, "write 1, or less to trust predictions less", above=0, most=1)
        checks.whole("full_steps", self.full_steps, 0, None, "2 are usual")
        hint = "it is for how many steps the budget is, more than are sent in full"
        checks.whole("horizon", self.horizon, self.full_steps + 1, None, hint)
        if self.budget * self.horizon <= self.full_steps:
            raise ConfigError(
                f"budget={self.budget} is no more than what full_steps={self.full_steps} of "
                f"horizon={self.horizon} steps send: write a larger budget, or a longer horizon"
            )
        checks.whole("whole_below", self.whole_below, 1, None, "1024 is usual; 1 for none")
        checks.whole("patience", self.patience, 1, None, "3 is usual")
        checks.matrices(self.matrices)

    @property
    def changes(self) -> tuple[int, ...]:
        """Where rounds no longer send everything."""
        return (self.full_steps,) if self.full_steps else ()

    def exempts(self, shape: torch.Size) -> bool:
        """None: small ones travel whole, but are counted."""
        return False

    def bound(self, matrices: tuple[Matrix, ...]) -> Compressor:
        """The same for these parameters."""
        return replace(self, matrices=matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """Each parameter has its count of faults."""
        return tuple(1 for _ in self.matrices) if field == "faults" else None

    def init(self, like: Tensor) -> State:
        """Nothing has moved yet."""
        past = {field: torch.zeros_like(like) for field in self._fields(0)}
        return {**past, "faults": like.new_zeros(len(self.matrices))}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Average the subset, predict the rest, and remember both."""
        index = (places(self.matrices) if ctx.step < self.full_steps else self.positions(ctx)).to(x.device)
        values = x[index]
        refuse_overflow(values, ctx)
        mine, marks = values.clone(), ctx.scratch("marks", x, (MARKS,), torch.float32)
        oldest, *_, newest = self._fields(ctx.round)
        _mark(marks, state[newest])
        yield Mean((values, marks))
        _compare(marks, ctx)
        faults = self._predict(index, values, state, ctx)
        ctx.out.index_copy_(0, index, values)
        refuse_overflow(ctx.out, ctx)
        spares = {field: ctx.spare(field, state[field]) for field in self._fields(0)}
        answer = spares[oldest].copy_(ctx.out)
        return Outcome(ctx.out, _Mirrored(answer, index, mine), {**state, oldest: answer, "faults": faults})

    # ---- who travels ----------------------------------------------------------------------------------

    @cached_property
    def turns(self) -> int:
        """k: how many entries travel by turns in a round."""
        n = sum(size(m) for m in self.matrices)
        rest = sum(size(m) for m in self._taking_turns)
        if self.budget == 1 or not rest:
            return rest
        full = self.full_steps / self.horizon
        each = (self.budget - full) / (1 - full)
        room = (self.budget * n - full * (n + MARKS)) / (1 - full) - (n - rest) - MARKS
        return min(rest, max(1, int(room + 1e-6 if room > 0 else each * rest)))

    def positions(self, ctx: Context) -> Tensor:
        """The entries that travel in a round in which not all do, rising; equal on all peers."""
        seed = zlib.crc32(f"{ctx.seed}|{ctx.name}|{ctx.prefix}|whose turn".encode())
        chosen = in_turn(self._taking_turns, self.turns, ctx.round, seed)
        return torch.cat((places([m for m in self.matrices if not self._turns(m)]), chosen)).sort().values

    @property
    def _taking_turns(self) -> list[Matrix]:
        return [m for m in self.matrices if self._turns(m)]

    def _turns(self, m: Matrix) -> bool:
        return m.dims > 1 and size(m) >= self.whole_below

    # ---- what becomes of the others -------------------------------------------------------------------

    def _fields(self, round_: int) -> list[str]:
        """The names of the last answers before this round, oldest first."""
        depth = self.predictor.depth
        return [f"past{(round_ + i) % depth}" for i in range(depth)]

    def _predict(self, index: Tensor, values: Tensor, state: State, ctx: Context) -> Tensor:
        """Overwrite `ctx.out` with predictions, of all entries; return the new count of faults."""
        faults = ctx.spare("faults", state["faults"])
        ctx.out.zero_()
        if ctx.out.is_meta or ctx.round < self.predictor.depth or isinstance(self.predictor, Stale):
            return faults.copy_(state["faults"])
        past = [state[field] for field in self._fields(ctx.round)]
        counts = state["faults"].tolist()
        for i, (m, (a, b)) in enumerate(zip(self.matrices, self._parts(index), strict=True)):
            if not self._turns(m) or a == b:
                continue
            self._predict_one(m, past, values[a:b].float().mean(), ctx.out)
            worse = _worse(ctx.out[index[a:b]], values[a:b])
            if counts[i] >= self.patience:
                ctx.out[m.start : m.start + size(m)] = 0
            counts[i] = min(counts[i] + 1, self.patience) if worse else 0
        return faults.copy_(torch.tensor(counts))

    def _predict_one(self, m: Matrix, past: list[Tensor], trend: Tensor, out: Tensor) -> None:
        stop = m.start + size(m)
        for start in range(m.start, stop, PIECE):
            piece = slice(start, min(start + PIECE, stop))
            change = self.predictor.change(
                torch.stack([each[piece] for each in past]), trend, kind_of(m.dims)
            )
            torch.mul(change, self.shrink, out=out[piece])

    def _parts(self, index: Tensor) -> Iterator[tuple[int, int]]:
        """Which of the chosen entries belong to each parameter, as (first, behind the last)."""
        edges = [[m.start, m.start + size(m)] for m in self.matrices]
        at = torch.searchsorted(index, torch.tensor(edges, device=index.device))
        return ((a, b) for a, b in at.tolist())


def _worse(guess: Tensor, true: Tensor) -> bool:
    """Whether it is farther from the truth than zero is."""
    guess, true = guess.float(), true.float()
    return bool(torch.linalg.vector_norm(guess - true) > torch.linalg.vector_norm(true))


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _mark(marks: Tensor, answer: Tensor) -> None:
    """A checksum of 5 bits, and its square: their means tell on every rank whether all are equal."""
    if marks.is_meta:
        return
    mark = int(answer.view(_BITS[answer.element_size()]).sum()) % 32
    marks[0], marks[1] = mark, mark * mark


def _compare(marks: Tensor, ctx: Context) -> None:
    """Refuse to go on where histories differ.

    Raises:
        RoundError: on all ranks, in the round after they have come to differ, or soon.
    """
    if marks.is_meta:
        return
    mean, square = marks.tolist()
    if square - mean * mean > 0.5 / ctx.peers:
        raise RoundError(
            f"in step {ctx.step} the ranks predict differently in the lot of {ctx.name}: the versions of "
            "torch, the processors or the predictor's files are not the same on all. Make them the same, or "
            "write predictor=Stale()"
        )


@dataclass(frozen=True)
class _Mirrored(Sent):
    """This rank's own entries where they were sent, and elsewhere what all ranks predict."""

    answer: Tensor
    index: Tensor
    mine: Tensor

    def take_from_(self, owed: Tensor) -> None:
        owed.sub_(self.answer)
        owed.index_add_(0, self.index, self.answer[self.index] - self.mine)

    def dense(self, like: Tensor) -> Tensor:
        return self.answer.clone().index_copy_(0, self.index, self.mine).view_as(like)
