"""Whole chunks, chosen alike by all ranks (coarse-grained sparse communication, GradientFlow)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors import ratio
from tacit.contracts import AllReduce, Compressor, Context, Exchange, Outcome, Sparse, State
from tacit.exchange.finite_checks import refuse_overflow


@dataclass(frozen=True)
class LargestChunks(Compressor):
    """Send the chunks of largest mean L1 norm, as a dense all-reduce; no positions travel.

    Two all-reduces (Sun et al. 2019, arXiv 1902.06855): of each rank's norms, one a chunk; then of the
    entries of the ceil(ratio x chunks) chunks whose norms add up to most. Bytes: 2 (P - 1) / P x 4 x
    ceil(n / chunk), and 2 (P - 1) / P x b x (chunks sent) x chunk; the last chunk is filled up with zeros.
    Put `ErrorFeedback` around it: what is not sent waits. A bucket shorter than two chunks is sent whole.

    Differences from the paper: chunks are parts of a bucket, where it joins all gradients first; its warm-up
    is the algorithm's.

    Attributes:
        ratio: the share of the chunks that is sent, in (0, 1].
        chunk: entries of a chunk; the paper's 32768. Fewer choose better, and send more norms.
    """

    ratio: float = 0.1
    chunk: int = 32768

    def __post_init__(self) -> None:
        ratio.check(self.ratio)
        checks.whole("chunk", self.chunk, 1, None, "write 32768, as in the paper, or less for small models")

    def init(self, like: Tensor) -> State:
        """No state; wrap it in `ErrorFeedback` to have a residual."""
        return {}

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """Agree on the chunks by their norms, and average these."""
        numel, count = x.numel(), -(-x.numel() // self.chunk)
        most = ratio.count(self.ratio, count)
        rows = torch.nn.functional.pad(x, (0, count * self.chunk - numel)).view(count, self.chunk)
        norms = rows.abs().sum(dim=1, dtype=torch.float32)
        if x.dtype == torch.float64:
            norms.clamp_(max=torch.finfo(norms.dtype).max / 2)
        refuse_overflow(norms, ctx)
        yield AllReduce((norms,))
        if x.is_meta:
            yield AllReduce((x.new_empty(most, self.chunk),))
            return Outcome(ctx.out, Sparse(x.new_empty(0, dtype=torch.int64), x.new_empty(0)), state)
        chosen = norms.topk(most).indices.sort().values
        values = rows[chosen]
        places = (chosen[:, None] * self.chunk + torch.arange(self.chunk, device=x.device)).view(-1)
        inside = places < numel
        sent = Sparse(places[inside], values.view(-1)[inside])
        (mean,) = yield AllReduce((values,))
        ctx.out.zero_().index_copy_(0, places[inside], mean.view(-1)[inside])
        return Outcome(ctx.out, sent, state)
