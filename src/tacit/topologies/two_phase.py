"""Compressed both ways: a reduce-scatter of payloads, then an all-gather of the compressed means."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor

from tacit.contracts import (
    WORLD,
    Compressor,
    Context,
    Deal,
    Exchange,
    Gather,
    OneShot,
    Place,
    Reduce,
    Request,
    Sent,
    Spans,
    State,
    Topology,
)
from tacit.exchanges import on, reduced, watched
from tacit.topologies.flat import reduce_flat

SECOND = "topology.second"
"""The state field: what the compressed means of this rank's stretch still owe."""
GRAIN = 512
"""Stretches begin at multiples of it: the blocks in which codecs pack."""


@dataclass(frozen=True)
class TwoPhase(Topology):
    """Each rank averages one stretch of the tensor for all, and sends the mean compressed too.

    Rank i gets all payloads of stretch i, averages them, adds what its earlier means still owe, compresses
    the sum as the peers did and sends it to all. A payload of s bytes costs 2 (P - 1) / P x s a rank, where
    an all-gather costs (P - 1) x s: no more than twice s, however many ranks there are. Error feedback on
    both sides: DoubleSqueeze (Tang et al., ICML 2019), dist-EF-SGD (Zheng et al., NeurIPS 2019). Each
    stretch has scales, and entries chosen, of its own.

    Payloads that add up go by an all-reduce, which has two phases already. So do, by an all-gather, those of
    tensors of fewer than 512 entries a rank, and of the smaller parts of a `Select`.
    """

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """What the second phase owes."""
        return () if _codec(compressor) is None else (SECOND,)

    def keeps(self, numel: int, compressor: Compressor, here: Place) -> Mapping[str, tuple[int, int]]:
        """What the second phase owes, of this rank's stretch."""
        if _codec(compressor) is None or not _shares(numel, here.peers):
            return {}
        return {SECOND: _stretches(numel, here.peers)[here.rank]}

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Two messages for the one codec that speaks of the whole tensor."""
        after: dict[str, Tensor] = {}

        def reduce(request: Reduce) -> Generator[Request, Any, tuple[Tensor, Sent]]:
            if SECOND not in state or request.codec != _codec(compressor) or request.x.numel() != x.numel():
                return (yield from reduce_flat(request))
            after[SECOND] = ctx.spare(SECOND, state[SECOND])
            return (yield from _in_two_phases(request, state[SECOND], after[SECOND]))

        theirs = {field: tensor for field, tensor in state.items() if field != SECOND}
        talk = reduced(compressor.exchange(x, theirs, ctx), reduce)
        done = yield from on(WORLD, watched(talk, ctx.word, ctx.total))
        return done._replace(state={**done.state, **after})


def _in_two_phases(
    request: Reduce, before: Tensor, after: Tensor
) -> Generator[Request, Any, tuple[Tensor, Sent]]:
    codec, ctx, spans = request.codec, request.ctx, _stretches(request.x.numel(), request.ctx.peers)
    payloads = tuple(request.encode(*span, part=f"to{i}") for i, span in enumerate(spans))
    theirs = yield Deal(payloads)
    start, stop = spans[ctx.rank]
    mean = ctx.scratch("mean", request.x, (spans[0][1],), request.x.dtype)
    codec.decode_mean_(theirs, mean[: stop - start])
    all_ = yield Gather(_encoded_again(request, mean, before, after))
    for (start, stop), payload in zip(spans, all_, strict=True):
        if stop - start == mean.numel():
            codec.decode_(payload, ctx.out[start:stop])
        else:
            codec.decode_(payload, mean)
            ctx.out[start:stop] = mean[: stop - start]
    return ctx.out, _SentInStretches(codec, payloads, spans)


def _encoded_again(request: Reduce, mean: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, ...]:
    """The payload of the mean and of what earlier ones owe; all ranks' have the shape of the longest."""
    short = before.numel()
    if short == mean.numel():
        return Reduce(request.codec, mean, request.ctx, before, after).encode(part="again")
    padded = [request.ctx.scratch(f"padded{i}", mean, mean.shape, mean.dtype) for i in range(2)]
    padded[0][:short] = before
    padded[0][short:] = 0
    mean[short:] = 0
    payload = Reduce(request.codec, mean, request.ctx, *padded).encode(part="again")
    after.copy_(padded[1][:short])
    return payload


@dataclass(frozen=True)
class _SentInStretches(Sent):
    codec: OneShot
    payloads: tuple[tuple[Tensor, ...], ...]
    spans: Spans

    def take_from_(self, owed: Tensor) -> None:
        for (start, stop), payload in zip(self.spans, self.payloads, strict=True):
            self.codec.sent(payload, owed[start:stop]).take_from_(owed[start:stop])

    def dense(self, like: Tensor) -> Tensor:
        whole = like.new_empty(like.shape)
        for (start, stop), payload in zip(self.spans, self.payloads, strict=True):
            self.codec.decode_(payload, whole[start:stop])
        return whole


def _stretches(numel: int, peers: int) -> Spans:
    """As long as each other, the last one shorter."""
    blocks = -(-numel // GRAIN)
    length = -(-blocks // peers) * GRAIN
    cuts = [min(i * length, numel) for i in range(peers + 1)]
    return tuple(pairwise(cuts))


def _shares(numel: int, peers: int) -> bool:
    """Whether every rank gets a stretch."""
    return peers > 1 and all(start < stop for start, stop in _stretches(numel, peers))


def _codec(compressor: Compressor) -> OneShot | None:
    """What speaks once of the whole tensor, inside all wrappers, and does not add up."""
    while not isinstance(compressor, OneShot):
        inside = getattr(compressor, "main", None) or getattr(compressor, "inner", None)
        if inside is None:
            return None
        compressor = inside
    return None if compressor.additive else compressor
