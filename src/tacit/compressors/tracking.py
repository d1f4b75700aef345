"""Replicas that follow the mean step of all, by gossip (gradient tracking)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

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
from tacit.exchange.joined_requests import fuse


@dataclass(frozen=True)
class Tracking(MixingCompressor):
    """Gradient tracking: each replica steps by its estimate of the mean step, and mixes both.

        y_i <- y_i + u_i - u_i of the round before     u_i: the optimizer's own step, -lr g_i with SGD
        x_i <- sum_j W_ij (x_j + y_j);    y_i <- sum_j W_ij y_j

    The mean of the y_i is that of the u_i in every round, so that replicas with different data come to one
    optimum with a constant learning rate, where D-PSGD leaves them apart (DIGing: Nedic, Olshevsky & Shi
    2017, arXiv 1607.03218; with stochastic gradients: Pu & Nedic 2018, arXiv 1805.11454). Two messages of the
    parameters' size to each neighbour. For `Gossip` in any of its graphs, and `Groups`, with `Mix`.

    State: `before`, the replica as the last mix left it; `last`, its last own step; `tracker`, y. Of the
    tensor's shape, in fp32 where that is of two bytes, and so is what is sent.
    """

    on_device: ClassVar[bool] = True
    fixed_graph: ClassVar[bool] = False

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: the steps of all are tracked."""
        return False

    def init(self, like: Tensor) -> State:
        """Zeros: all replicas are at the anchor, and no step has been taken."""
        fields = ("before", "last", "tracker")
        return {name: torch.zeros_like(like, dtype=state_dtype(like.dtype)) for name in fields}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Mix the replica after a step by the tracker, and the tracker; a replica alone is its own answer."""
        if ctx.peers == 1:
            ctx.out.copy_(x)
            return Outcome(ctx.out, Exact(x), state)
        new = {name: ctx.spare(name, kept) for name, kept in state.items()}
        before, last, tracker = (new[name] for name in ("before", "last", "tracker"))
        moved, step = (ctx.scratch(name, x, x.shape, last.dtype) for name in ("moved", "step"))
        torch.sub(x, state["before"], out=last)
        torch.sub(last, state["last"], out=step)
        step.add_(state["tracker"])
        torch.add(state["before"], step, out=moved)
        yield from fuse(
            [
                ReduceEncoded(Dense(), moved, ctx.inside("moved", out=before)),
                ReduceEncoded(Dense(), step, ctx.inside("step", out=tracker)),
            ]
        )
        ctx.out.copy_(before)
        return Outcome(ctx.out, Exact(x), new)
