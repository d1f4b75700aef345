"""All replicas of an axis at once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllReduce,
    Compressor,
    Context,
    Exchange,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
)
from tacit.exchange.combinators import on, reduced, watched
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.topologies.on_axis import OnAxis


@dataclass(frozen=True)
class Flat(OnAxis):
    """One ring over all ranks: an all-reduce where payloads add up, an all-gather where they do not.

    Attributes:
        axis: "world": all replicas. "node": those of one node; nodes then know nothing of each other: the
            near level of `Levels`. "net": those with the same place in their nodes.
    """

    on_device: ClassVar[bool] = True

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every request goes to the axis."""
        exchange = reduced(compressor.exchange(x, state, ctx), reduce_flat)
        return on(self.axis, watched(exchange, ctx.nonfinite_flags, ctx.finite_probe))


def reduce_flat(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
    """The mean of what all peers encoded, written to the codec's output."""
    codec, out, payload = request.codec, request.ctx.out, encoded(request)
    if codec.additive:
        codec.decode_((yield AllReduce(payload)), out)
    else:
        # In rank order on every rank, so that all of them round alike.
        codec.decode_mean_((yield AllGather(payload)), out)
    return out, transmitted(request, payload)
