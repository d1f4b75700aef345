"""The last two received changes of each entry, their ages, and the size of each layer's changes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.contracts import Context, State
from tacit.prediction.predictor import ROUNDS, Received, Seen, seen_of

FIELDS = ("last", "before", "age", "gap")
"""For each entry: two changes, in the type of the parameters; and two ages in rounds, in int16."""
SWINGS = "swings"
"""For each parameter: the root mean square of its received changes in the last `ROUNDS` rounds, as a ring."""
_NEVER = -(1 << 15)


def first(like: Tensor) -> dict[str, Tensor]:
    """The state before any change was received: 3 floats an entry, where the parameters are in fp32."""
    counts = torch.zeros_like(like, dtype=torch.int16)
    nothing = {"last": torch.zeros_like(like), "before": torch.zeros_like(like)}
    # Counted up by one from round to round; above 0 only once a change was received.
    return {**nothing, "age": counts + _NEVER, "gap": counts}


def remembered(state: State, index: Tensor, values: Tensor, ctx: Context) -> dict[str, Tensor]:
    """The state after a round in which the changes `values` of the entries `index` were received."""
    last, before, age, gap = (ctx.spare(field, state[field]).copy_(state[field]) for field in FIELDS)
    # Scattered, as that takes a third of the time of index_copy_ and index_fill_.
    before.scatter_(0, index, state["last"].index_select(0, index))
    last.scatter_(0, index, values)
    gap.scatter_(0, index, state["age"].index_select(0, index).clamp_(min=0))
    age.scatter_(0, index, torch.zeros_like(index, dtype=torch.int16)).add_(1)
    return dict(zip(FIELDS, (last, before, age, gap), strict=True))


@dataclass(frozen=True)
class ReceivedHistory:
    """The state before a round, and how the size of layers' changes moves in it.

    Attributes:
        state: the fields of `FIELDS`.
        ratios: shape (parameters, ROUNDS + 1): the present size of changes over that of so many
            rounds ago.
    """

    state: State
    ratios: Tensor

    def of(self, span: slice, i: int) -> Received:
        """The history of these entries of the parameter `i`."""
        before, last, age, gap = (self.state[field][span] for field in ("before", "last", "age", "gap"))
        return Received(before, last, age, gap, self.ratios[i])

    def judging(self, drawn: Tensor, owner: Tensor) -> tuple[Seen, Tensor]:
        """The history of these entries, each of parameter `owner`; and which have changes of two rounds."""
        before, last, age, gap = (
            self.state[field].index_select(0, drawn) for field in ("before", "last", "age", "gap")
        )
        seen = seen_of(before, last, age, gap, lambda rounds: self.ratios[owner.repeat(2), rounds])
        return seen, torch.minimum(age, gap) > 0


def swings_after(state: State, values: Sequence[Tensor], ctx: Context) -> tuple[Tensor, Tensor]:
    """The state field `SWINGS` after a round, and the ratios of `ReceivedHistory`.

    Args:
        values: the received changes of each parameter.
    """
    past = state[SWINGS].view(-1, ROUNDS)
    now = torch.tensor([root_mean_square(each) for each in values], dtype=past.dtype, device=past.device)
    number = ctx.round % ROUNDS
    # Without a received change a layer keeps its value.
    now = torch.where(now > 0, now, past[:, number - 1])
    ages = torch.arange(ROUNDS + 1).clamp(min=1)
    then = past[:, (ctx.round - ages) % ROUNDS]
    known = (then > 0) & (now > 0).unsqueeze(1)
    ratios = torch.where(known, now.unsqueeze(1) / torch.where(known, then, 1.0), 1.0).float()
    field = ctx.spare(SWINGS, state[SWINGS]).copy_(state[SWINGS])
    field.view(-1, ROUNDS)[:, number] = now
    return field, ratios


def root_mean_square(values: Tensor) -> float:
    """The root mean square in float64; 0 without values."""
    size = float(torch.linalg.vector_norm(values, dtype=torch.float64)) if len(values) else 0.0
    return min(size, sys.float_info.max) / math.sqrt(max(1, len(values)))
