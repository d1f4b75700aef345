"""Replicas that each take outer steps, with momentum, towards the mix of a few (NoLoCo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.contracts import (
    Context,
    Exact,
    Exchange,
    MixingCompressor,
    Outcome,
    ReduceEncoded,
    State,
    state_dtype,
)


@dataclass(frozen=True)
class OuterMix(MixingCompressor):
    """NoLoCo: mix the replicas, and take an outer step with momentum towards the mix.

        momentum_i <- momentum * momentum_i + lr * (sum_j W_ij x_j - slow_i)
        slow_i     <- slow_i + momentum_i;    answer = slow_i

    NoLoCo (Kolehmainen et al. 2025, arXiv 2506.10911) with `Groups(2, "random", equal=True)`; for `Gossip`
    too, in any of its graphs. With `Mix`. With lr=1 and no momentum it is gossip.

    State: `slow` and `momentum`, of the tensor's shape, in fp32 where that is of two bytes, and so is what is
    sent. Both are reset when replicas are made equal.

    Attributes:
        lr: the outer learning rate, above 0.
        momentum: from 0 to below 1.
    """

    on_device: ClassVar[bool] = True
    fixed_graph: ClassVar[bool] = False

    lr: float = 0.7
    momentum: float = 0.5

    def __post_init__(self) -> None:
        checks.real("lr", self.lr, "write 0.7", above=0)
        checks.real("momentum", self.momentum, "write 0.5, or 0 for none", least=0, below=1)

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: all take outer steps."""
        return False

    def init(self, like: Tensor) -> State:
        """Zeros: all replicas are at the anchor, without momentum."""
        return {name: torch.zeros_like(like, dtype=state_dtype(like.dtype)) for name in ("slow", "momentum")}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Mix, and take an outer step; a replica alone is its own answer."""
        if ctx.peers == 1:
            ctx.out.copy_(x)
            return Outcome(ctx.out, Exact(x), state)
        slow, momentum = (ctx.spare(name, state[name]) for name in ("slow", "momentum"))
        given = ctx.scratch("given", x, x.shape, slow.dtype).copy_(x)
        yield ReduceEncoded(Dense(), given, ctx.inside("mix", out=momentum))
        momentum.sub_(state["slow"]).mul_(self.lr).add_(state["momentum"], alpha=self.momentum)
        torch.add(state["slow"], momentum, out=slow)
        ctx.out.copy_(slow)
        return Outcome(ctx.out, Exact(x), {"slow": slow, "momentum": momentum})
