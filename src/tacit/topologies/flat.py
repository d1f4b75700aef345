"""All replicas of an axis exchange at once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor

from tacit.contracts import (
    NODE,
    AllGather,
    AllReduce,
    Compressor,
    Context,
    Exchange,
    OneShot,
    OneShotUse,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
)
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.exchange.joined_requests import conducted
from tacit.topologies.on_axis import OnAxis
from tacit.topologies.variable_length import all_gathered


@dataclass(frozen=True)
class Flat(OnAxis):
    """One ring over all ranks: an all-reduce of additive payloads, an all-gather of others.

    Attributes:
        axis: "world": all replicas. "node": those of one node, as the level inside nodes of `Levels`: nodes
            then do not exchange. "net": those with the same rank in their nodes.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True
    takes_variable_length: ClassVar[bool] = True

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words; an all-gather if a payload is not additive."""
        gathered = any(side is not None for each in compressors for side in two_sided(each))
        within = " in each node" if self.axis == NODE else ""
        return f"{'all-gather' if gathered else 'all-reduce'}{within}"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "all-reduce" if gathered_use(compressors[0], 0) is None else "all-gather"

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every request goes to the axis."""
        exchange = compressor.exchange(x, state, ctx)
        return conducted(exchange, self.axis, reduce_flat, ctx.nonfinite_flags, ctx.finite_probe)


def two_sided(compressor: Compressor) -> list[OneShotUse | None]:
    """For each phase, the codec that can compress the mean again; None: there is none."""
    return [gathered_use(compressor, step) for step in (0, *compressor.changes)]


def gathered_use(compressor: Compressor, step: int) -> OneShotUse | None:
    """The codec that can compress this step's mean again: one-shot, with payloads that do not add up."""
    one_shot = compressor.one_shot(step)
    return None if one_shot is None or one_shot.codec.additive else one_shot


def codecs_in(part: object) -> Iterator[OneShot]:
    """All one-shot codecs, inside all wrappers."""
    if isinstance(part, OneShot):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from codecs_in(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from codecs_in(getattr(part, field.name))


def reduce_flat(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
    """Write the mean of what all peers encoded to `ctx.out`; return it, and what this rank sent."""
    codec, out, payload = request.codec, request.ctx.out, encoded(request)
    if codec.additive:
        codec.decode_((yield AllReduce(payload)), out)
    elif codec.varies:
        codec.decode_mean_((yield from all_gathered(codec, payload, request.x.numel())), out)
    else:
        codec.decode_mean_((yield AllGather(payload)), out)  # in rank order on all, so that all round alike
    return out, transmitted(request, payload)
