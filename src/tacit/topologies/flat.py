"""All replicas at once, whatever lies between them."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tacit.contracts import (
    WORLD,
    Compressor,
    Context,
    Exchange,
    Gather,
    Mean,
    Reduce,
    Request,
    Sent,
    State,
    Topology,
)
from tacit.exchanges import on, reduced


@dataclass(frozen=True)
class Flat(Topology):
    """One ring over all ranks: an all-reduce where payloads add up, an all-gather where they do not."""

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every wish goes to the axis "world"."""
        return on(WORLD, reduced(compressor.exchange(x, state, ctx), reduce_flat))


def reduce_flat(request: Reduce) -> Generator[Request, Any, tuple[Tensor, Sent]]:
    """The mean of what all peers encoded, written to the codec's output."""
    codec, out = request.codec, request.out
    if codec.additive:
        codec.decode_((yield Mean(request.payload)), out)
    else:
        payloads = yield Gather(request.payload)
        out.zero_()
        for payload in payloads:  # in rank order on every rank, so that all of them round alike
            codec.decode_add_(payload, out, 1 / len(payloads))
    return out, codec.sent(request.payload, request.x)
