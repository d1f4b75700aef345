"""Replicas that send their weight, by which what has come to a rank is divided (push-sum, SGP)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.contracts import (
    Compressor,
    Context,
    Exact,
    Exchange,
    Grouped,
    Matrix,
    MixingCompressor,
    Outcome,
    ReduceEncoded,
    State,
    state_dtype,
)


@dataclass(frozen=True)
class PushSum(MixingCompressor):
    """Send shares of a replica and of its weight; it becomes the sum of what arrives, over the weights.

        y_i <- sum_j P_ij (y_j + step_j);    w_i <- sum_j P_ij w_j;    x_i = y_i / w_i

    Stochastic gradient push (Assran, Loizou, Ballas & Rabbat, ICML 2019, arXiv 1811.10792), for a `Directed`
    graph, with `Mix`. Weights begin at 1, and their sum over the ranks stays. Where all are made equal, each
    counts by its weight, so that the mean of all y is what is kept.

    State: `pushed`, y less w times the anchor, of the tensor's shape; `weight`, one number for each
    parameter, all the same. Both in fp32 where the tensor is of two bytes, and so is what is sent.

    Attributes:
        matrices: the parameters of the flat tensor; filled in by the session.
    """

    on_device: ClassVar[bool] = True
    fixed_graph: ClassVar[bool] = False
    weighed: ClassVar[bool] = True

    matrices: tuple[Matrix, ...] = ()

    def __post_init__(self) -> None:
        checks.matrices(self.matrices)

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter, as others would have no weight."""
        return False

    def with_layout(self, matrices: tuple[Matrix, ...]) -> Compressor:
        return replace(self, matrices=matrices)

    def widths(self, field: str) -> tuple[int, ...] | None:
        """One number of `weight` for each parameter."""
        return (1,) * len(self.matrices) if field == "weight" and self.matrices else None

    def init(self, like: Tensor) -> State:
        """Nothing was pushed, and each replica has weight 1."""
        dtype = state_dtype(like.dtype)
        weights = max(1, len(self.matrices))
        return {"pushed": torch.zeros_like(like, dtype=dtype), "weight": like.new_ones(weights, dtype=dtype)}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Push the replica with its steps, and its weight; a replica alone is its own answer."""
        pushed, weight = (ctx.spare(name, state[name]) for name in ("pushed", "weight"))
        if ctx.peers == 1:
            ctx.out.copy_(x)
            return Outcome(ctx.out, Exact(x), state)
        given = ctx.scratch("given", x, x.shape, pushed.dtype).copy_(x)
        self.counted_(given, state)
        yield Grouped(
            (
                ReduceEncoded(Dense(), given, ctx.inside("pushed", out=pushed)),
                ReduceEncoded(Dense(), state["weight"], ctx.inside("weight", out=weight)),
            )
        )
        ctx.out.copy_(torch.div(pushed, weight[:1], out=given))
        return Outcome(ctx.out, Exact(x), {"pushed": pushed, "weight": weight})

    def counted_(self, x: Tensor, state: State) -> None:
        """y and the steps since: x is y / w and those steps, and is overwritten by y and them."""
        pushed = state["pushed"]
        x.add_((pushed - pushed / state["weight"][:1]).to(x.dtype))
