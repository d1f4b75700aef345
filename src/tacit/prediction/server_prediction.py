"""Deltas of which workers push a part, and a server predicts the rest (MP²: Liu et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit.compressors.dense import Dense
from tacit.contracts import Context, Exchange, OneShot, Outcome, Payload, ReduceEncoded, State
from tacit.errors import ConfigError, PayloadError, RoundError
from tacit.exchange.finite_checks import refuse_overflow
from tacit.exchange.joined_requests import as_asked, leaves
from tacit.prediction.agreement_check import Mirrored
from tacit.prediction.partly_sent import Predicted

NOTES = 3
"""Numbers that workers add to a push: rounds so far, the learning rate, whether everything is sent."""
_COUNTED = 1 << 20
"""Round numbers are sent modulo this, which fp32 holds exactly."""


@dataclass(frozen=True)
class Pulled(Predicted):
    """As `Predicted`, but the server predicts, and workers pull all entries from it, as in the paper.

        push    x on S, `budget` counts these             4 (w + k) bytes a worker and round
        pull    the mean on S, predictions elsewhere      4 n bytes

    So the budget is of what is pushed. The answers are those of `Predicted`, for more than half the bytes of
    plain training; but one process predicts, not each, and workers have no history. Needs a parameter server
    that averages (`Star()`), and parameters in fp32 or fp64.

    State: `rates`, as of `Budgeted`.
    """

    @property
    def needs_server(self) -> bool:
        """True."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.subset == "magnitude" or self.values != Dense():
            raise ConfigError(
                f"subset={self.subset!r}, values={self.values} cannot be pushed to a server that predicts: "
                "write subset='rotating' and values='fp32'"
            )

    def init(self, like: Tensor) -> State:
        """`rates` alone, at zero."""
        return {"rates": super().init(like)["rates"]}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Push the subset, and pull the mean and the predictions.

        Raises:
            ConfigError: the parameters are of a type that cannot count rounds.
        """
        if x.dtype not in (torch.float32, torch.float64):
            raise ConfigError(
                f"{self} of parameters in {x.dtype} is not possible: keep them in fp32 (autocast computes in "
                "less), or let all ranks predict (pull='subset')"
            )
        full = self.is_full(state["rates"], ctx)
        index = self.entries_of_round(full, ctx).where.to(x.device)
        mine = x[index]
        refuse_overflow(mine, ctx)
        notes = mine.new_tensor([ctx.round % _COUNTED, ctx.lr, ctx.step < self.full_steps])
        said = torch.cat((mine, notes))
        by = ServerPrediction(self._mirrored, x.numel(), ctx.seed, ctx.name, ctx.prefix)
        yield ReduceEncoded(Pushed(by), said, ctx)
        refuse_overflow(ctx.out, ctx)
        answer = ctx.scratch("answer", x, x.shape, x.dtype).copy_(ctx.out)
        rates = self.rates_after(state["rates"], ctx.lr, full, ctx)
        return Outcome(ctx.out, Mirrored(answer, index, mine), {"rates": rates})

    @cached_property
    def _mirrored(self) -> Predicted:
        return Predicted(**{field.name: getattr(self, field.name) for field in fields(Predicted)})


@dataclass(frozen=True)
class Pushed(Dense):
    """A worker's payload: exact entries, fewer than the answer has.

    Attributes:
        by: the compressor that the server runs on the mean.
    """

    entrywise: ClassVar[bool] = False

    by: ServerPrediction

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """The entries themselves."""
        return (x,)

    def of_sums(self, numel: int, peers: int) -> OneShot:
        """The codec of the answer, which is more than a sum."""
        return self.by


@dataclass(frozen=True)
class ServerPrediction(Dense):
    """A server's answer: the mean where it was pushed, and predictions elsewhere.

    It remembers the state of `by`, and `rounds`, how many it has answered.

    Attributes:
        by: predicts, and selects the entries of each round.
        numel: entries of the bucket.
        seed: of the session; `name`, `prefix`: of the bucket and its state. The selection follows from
        these.
    """

    entrywise: ClassVar[bool] = False
    answers: ClassVar[bool] = True

    by: Predicted
    numel: int
    seed: int
    name: str
    prefix: str

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """All entries; without a state only their number is known."""
        assert x.is_meta
        return (x.new_empty(self.numel),)

    def answer(self, mean: Tensor, memory: State | None, ctx: Context) -> tuple[Payload, State]:
        """The answer that every worker of `by` would have computed, from this mean of pushes.

        Raises:
            RoundError: the workers are in another round than the server's state.
        """
        if memory is None:
            memory = {
                **self.by.init(mean.new_empty(self.numel)),
                "rounds": torch.zeros((), dtype=torch.int64),
            }
        rounds, (told, lr, early) = int(memory["rounds"]), mean[-NOTES:].tolist()
        if not all(map(math.isfinite, (told, lr, early))):
            raise PayloadError(f"a worker's notes on the bucket of {self.name} are no finite numbers")
        if round(told) != rounds % _COUNTED:
            raise RoundError(
                f"the workers are in round {round(told)}, and the server has had {rounds} rounds of the "
                f"bucket of {self.name}: resume it with the --checkpoint of that moment, or start again"
            )
        out, x = (ctx.scratch(key, mean, (self.numel,), mean.dtype) for key in ("out", "told"))
        ctx = replace(
            ctx,
            out=out,
            seed=self.seed,
            name=self.name,
            prefix=self.prefix,
            round=rounds,
            step=0 if round(early) else self.by.full_steps,
            lr=lr,
        )
        full = self.by.is_full(memory["rates"], ctx)
        x[self.by.entries_of_round(full, ctx).where] = mean[:-NOTES]
        outcome = _alone(self.by.exchange(x, memory, ctx))
        return (out,), {**outcome.state, "rounds": memory["rounds"] + 1}


def _alone(exchange: Exchange) -> Outcome:
    """Run an exchange without peers: the mean is its own input."""
    answer: Any = None
    while True:
        try:
            request = exchange.send(answer)
            answer = as_asked(request, iter([each.payload for each in leaves(request)]))  # type: ignore[union-attr]
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
