"""Replicas that send themselves compressed, with error feedback (DeepSqueeze)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.compressed_gossip import CompressedMixing
from tacit.contracts import Context, Exchange, Outcome, State


@dataclass(frozen=True)
class Squeezed(CompressedMixing):
    """Send a replica itself, compressed with error feedback; move towards what the neighbours send.

        v_i = x_i + error_i;    error_i <- v_i - C(v_i)
        answer = x_i + gamma * (sum_j W_ij C(v_j) - C(v_i))

    DeepSqueeze (Tang et al. 2019, arXiv 1907.07346). C may be biased. The error is that of the messages
    about a replica; the replica itself loses nothing. For `Gossip`, with `Mix`.

    State: `error`, of the tensor's shape, in fp32 where that is of two bytes.

    Attributes:
        gamma: the consensus step size, the paper's eta, in (0, 1]. As for `PublicCopy`, it must be smaller if
            less arrives.
    """

    fixed_graph: ClassVar[bool] = False

    gamma: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "write 0.05 for top-k of 10 %, 0.5 for 8 bits an entry, 1.0 for what loses nothing"
        checks.real("gamma", self.gamma, hint, above=0, most=1)

    @property
    def kept(self) -> tuple[str, ...]:
        return ("error",)

    def mixed(self, x: Tensor, state: State, new: dict[str, Tensor], ctx: Context) -> Exchange:
        given = ctx.scratch("difference", x, x.shape, new["error"].dtype)
        torch.add(state["error"], x, out=given)
        mixed, mine, sent = yield from self.send(given, ctx)
        torch.sub(given, mine, out=new["error"])
        torch.add(x, mixed.sub_(mine), alpha=self.gamma, out=ctx.out)
        return Outcome(ctx.out, sent, new)
