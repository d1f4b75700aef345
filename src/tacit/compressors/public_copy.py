"""Replicas with public copies at their neighbours, which compressed differences update (CHOCO-SGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.compressed_gossip import CompressedMixing
from tacit.contracts import Context, Exchange, Outcome, State


@dataclass(frozen=True)
class PublicCopy(CompressedMixing):
    """CHOCO-SGD: send the compressed difference to a public copy, and move towards the neighbours' copies.

        q_i  = Q(x_i - public_i)                                     to all neighbours
        public_i     <- public_i + scale * q_i
        neighbours_i <- neighbours_i + scale * sum_j W_ij q_j        = sum_j W_ij public_j
        answer       =  x_i + gamma * (neighbours_i - public_i)

    Koloskova, Stich & Jaggi, ICML 2019 (arXiv 1902.00340), in the form that needs no copy of each neighbour.
    For `Gossip` in a graph that stays the same, with `Mix`. Q may be biased. Its error needs no residual: it
    is part of the next difference.

    State: `public` and `neighbours`, of the tensor's shape, in fp32 where that is of two bytes.

    Attributes:
        gamma: the consensus step size, in (0, 1]. The more the codec leaves out, the smaller it must be:
            replicas diverge if it is too large, and converge slowly if it is too small. 1 is right for a
            lossless codec.
        scale: a factor of what is decoded, in (0, 1]; for an unbiased codec of variance omega, which would
            overshoot, the papers take 1 / (1 + omega).
    """

    gamma: float = 0.05
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "write 0.05 for top-k of 1 %, 0.5 for 8 bits an entry, 1.0 for what loses nothing"
        checks.real("gamma", self.gamma, hint, above=0, most=1)
        checks.real("scale", self.scale, "write 1.0, or less for an unbiased codec", above=0, most=1)

    @property
    def kept(self) -> tuple[str, ...]:
        return ("public", "neighbours")

    def mixed(self, x: Tensor, state: State, new: dict[str, Tensor], ctx: Context) -> Exchange:
        difference = ctx.scratch("difference", x, x.shape, new["public"].dtype)
        torch.sub(x, state["public"], out=difference)
        mixed, mine, sent = yield from self.send(difference, ctx, self.scale)
        torch.add(state["public"], mine, out=new["public"])
        torch.add(state["neighbours"], mixed, out=new["neighbours"])
        torch.sub(new["neighbours"], new["public"], out=mixed)
        torch.add(x, mixed, alpha=self.gamma, out=ctx.out)
        return Outcome(ctx.out, sent, new)
