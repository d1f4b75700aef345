"""The few entries that matter most (Aji & Heafield 2017; with memory: Stich et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.compressors import ratio
from tacit.contracts import Context, OneShot, Payload, Sent, Sparse
from tacit.kernels.select import select_largest


@dataclass(frozen=True)
class TopK(OneShot):
    """Send the k = ceil(ratio x n) entries of largest magnitude: k x (4 + b) bytes, to P - 1 peers.

    Differences from the papers: the choice is made over all tensors of a lot at once, not tensor by tensor,
    and positions are int32. Put `ErrorFeedback` around it, or what is not sent is lost.

    Attributes:
        ratio: the share of the entries that is sent, in (0, 1]. Smaller sends less and converges slower.
    """

    ratio: float = 0.01

    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        ratio.check(self.ratio)

    def exempts(self, shape: torch.Size) -> bool:
        """Biases and norms are few and matter much: they stay dense."""
        return len(shape) < 2

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(values, positions)."""
        index, values = select_largest(x, ratio.count(self.ratio, x.numel()))
        return values, index

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Zeros, with those entries."""
        out.zero_()
        self.decode_add_(payload, out, 1.0)

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Scatter-add; touches k entries."""
        values, index = payload
        out.index_add_(0, index, values, alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Sent:
        """The chosen entries."""
        values, index = payload
        return Sparse(index, values)
