"""Replicas that are equal to their public copies, moved by compressed differences (DCD-PSGD)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.compressors.compressed_gossip import CompressedMixing
from tacit.contracts import Context, Exchange, OneShot, Outcome, State
from tacit.errors import ConfigError


@dataclass(frozen=True)
class DifferenceCopy(CompressedMixing):
    """Send the compressed change of a replica, and set the replica to the copy that its neighbours have.

        z_i = sum_j W_ij public_j + (x_i - public_i) - public_i      the mix and the step, minus the copy
        public_i <- public_i + C(z_i);    answer = public_i

    DCD-PSGD (Tang, Gan, Zhang, Zhang & Liu, NeurIPS 2018, arXiv 1803.06443). What C leaves out of a step is
    lost, so it must be unbiased and fine enough; with few bits take `PublicCopy`. For `Gossip` in a graph
    that stays the same, with `Mix`.

    State: `public` and `neighbours`, the sum over W's row, as in `PublicCopy`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.inner, OneShot)
        if not (self.inner.unbiased or self.inner.linear):
            raise ConfigError(
                f"DifferenceCopy({self.inner}) is not possible, as what it leaves out would be lost, and it "
                f"is not right in the mean: write DifferenceCopy(QSGD(bits=8)), or PublicCopy({self.inner})"
            )

    @property
    def kept(self) -> tuple[str, ...]:
        return ("public", "neighbours")

    def mixed(self, x: Tensor, state: State, new: dict[str, Tensor], ctx: Context) -> Exchange:
        moved = ctx.scratch("difference", x, x.shape, new["public"].dtype)
        torch.add(state["neighbours"], x, out=moved).sub_(state["public"], alpha=2.0)
        mixed, mine, sent = yield from self.send(moved, ctx)
        torch.add(state["public"], mine, out=new["public"])
        torch.add(state["neighbours"], mixed, out=new["neighbours"])
        ctx.out.copy_(new["public"])
        return Outcome(ctx.out, sent, new)
