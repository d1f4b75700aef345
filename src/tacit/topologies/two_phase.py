"""Compressed in both directions: a reduce-scatter of payloads, then an all-gather of compressed means."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllToAll,
    AxisRank,
    Compressor,
    Context,
    Exchange,
    OneShot,
    Payload,
    ReduceEncoded,
    Request,
    Spans,
    State,
    Transmitted,
    cut_factors,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded, encoded_spans
from tacit.exchange.joined_requests import answered, conducted, small_directly
from tacit.kernels.thread_scratch import thread_scratch
from tacit.topologies.flat import gathered_use, reduce_flat, two_sided
from tacit.topologies.on_axis import OnAxis
from tacit.topologies.variable_length import all_gathered, all_to_all
from tacit.torch_compat import zero_each_

SECOND = "topology.second"
"""The state field of the error of compressed means, for this rank's slice, in units of the mean."""
GRAIN = 512
"""Slices begin at multiples of this number, the block in which codecs pack."""
GATHERED = 1 << 22
"""The most entries, of all ranks, that are gathered whole rather than averaged by a few ranks."""


@dataclass(frozen=True)
class TwoPhase(OnAxis):
    """Each rank averages one slice of the tensor for all, and sends the mean compressed too.

    Rank i gets all payloads of slice i, averages them, compresses the mean as the peers did and sends it to
    all. A payload of s bytes costs 2 (P - 1) / P x s a rank, where an all-gather costs (P - 1) x s: no more
    than twice s, however many ranks there are. Each slice has its own scales and chosen entries: a
    sparse compressor sends each rank the share of its slice, and gets as many entries of the mean back.

    Where the compressor is under `ErrorFeedback`, rank i adds the residual of its earlier means, and keeps
    the error of this one: error feedback on both sides, DoubleSqueeze (Tang et al., ICML 2019),
    dist-EF-SGD (Zheng et al., NeurIPS 2019). Under `MeanFeedback` only the means have one. Otherwise neither
    side has a residual: an unbiased compressor
    is unbiased still, with the variance of two roundings; what a biased one loses is lost twice.

    Additive payloads go by an all-reduce, which has two phases already; up to 16 KiB among up to 16 ranks,
    such as of biases alone, directly to all others, in one round trip. An all-gather is used for
    tensors with fewer blocks of 512 entries than there are ranks, and for the smaller parts of a `Partition`.
    Where that would carry millions of entries, among many ranks, a few ranks have a slice of one block each,
    and the others none, if codecs encode block by block. The phases of `Scheduled` are treated one by one.

    Attributes:
        axis: as of `Flat`.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True
    takes_variable_length: ClassVar[bool] = True

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words for `Attached.active_path`."""
        return "two phases"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        """The text for two phases, as no collective has that name."""
        return "two phases, which compress the mean too"

    def check(self, compressor: Compressor) -> None:
        """Refuse what `OnAxis` refuses, and codecs that are not sliceable."""
        super().check(compressor)
        refuse_unsliceable(compressor)

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """The residual of the means, if the compressor has error feedback.

        Raises:
            ConfigError: a codec takes no slices; or a phase that keeps a residual of the means is followed by
                one without, which would never send it.
        """
        refuse_unsliceable(compressor)
        has_feedback = [side is not None and side.keeps_means for side in two_sided(compressor)]
        if sorted(has_feedback) != has_feedback:
            raise ConfigError(
                f"{compressor} has a phase that keeps a residual of the means, and after it one that adds "
                "up or sends several messages, and would never send that residual: write "
                "topology=Flat(), or put that phase first"
            )
        return (SECOND,) if any(has_feedback) else ()

    def keeps(self, numel: int, compressor: Compressor, here: AxisRank) -> Mapping[str, tuple[int, int]]:
        """The residual of the means, for this rank's slice."""
        # `fields` refuses a phase that keeps means before one that does not.
        last = gathered_use(compressor, (0, *compressor.changes)[-1])
        if last is None or not last.keeps_means or not _sliced(numel, here.peers, last.codec):
            return {}
        return {SECOND: _slices(numel, here.peers)[here.rank]}

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """The compressor's exchange, with two messages for the codec of the whole tensor."""
        side = gathered_use(compressor, ctx.step)
        if side is not None and not _sliced(x.numel(), ctx.peers, side.codec):
            side = None
        new_residual = {field: tensor for field, tensor in state.items() if field == SECOND}

        def reduce(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
            if side is None or request.codec != side.codec or request.x.numel() != x.numel():
                return (yield from reduce_flat(request))
            return (yield from _in_two_phases(request, side.others, new_residual, ctx))

        theirs = {field: tensor for field, tensor in state.items() if field != SECOND}
        exchange = compressor.exchange(x, theirs, ctx)
        exchange = conducted(exchange, self.axis, reduce, ctx.nonfinite_flags, ctx.finite_probe)
        if side is None:
            exchange = answered(exchange, lambda request: small_directly(request, ctx.peers))
        done = yield from exchange
        return done._replace(state={**done.state, **new_residual})


def refuse_unsliceable(compressor: Compressor) -> None:
    """Refuse a codec that cannot encode slices.

    Raises:
        ConfigError: names the codec and what to write.
    """
    for side in two_sided(compressor):
        if side is not None and not side.codec.sliceable:
            raise ConfigError(
                f"{side.codec} is not sliceable, and TwoPhase() has each rank average a slice: write "
                "topology=Flat(); or, if any slice of a tensor may be encoded by itself, write sliceable = "
                f"True in {type(side.codec).__name__}"
            )


def _in_two_phases(
    request: ReduceEncoded, others: Spans, new_residual: dict[str, Tensor], ctx: Context
) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
    codec, out, spans = request.codec, request.ctx.out, _slices(request.x.numel(), ctx.peers)
    payloads, sent = _encoded_for_each(request, spans)
    if codec.varies:
        theirs = yield from all_to_all(codec, payloads, [stop - start for start, stop in spans], ctx.rank)
    else:
        theirs = yield AllToAll(payloads)
    start, stop = spans[ctx.rank]
    mean = thread_scratch("mean", spans[0][1], request.x.dtype, request.x.device)
    if start < stop:
        codec.decode_mean_(theirs, mean[: stop - start])
    if stop - start < len(mean):
        mean[stop - start :].zero_()
    not_ours = list(_within(others, start, stop))
    _clear(mean, not_ours)
    if SECOND in new_residual:
        before, new_residual[SECOND] = new_residual[SECOND], ctx.spare(SECOND, new_residual[SECOND])
        again = request.ctx
        if again.rescale:
            again = replace(again, rescale=cut_factors(again.rescale, start, stop))
        payload = _encoded_again(codec, again, mean, before, new_residual[SECOND])
        _clear(new_residual[SECOND], not_ours)
    else:
        given = codec.encode(mean, request.ctx.inside("again"))
        lies = mean.untyped_storage().data_ptr()  # where other buckets write before this one has left
        payload = tuple(x.clone() if x.untyped_storage().data_ptr() == lies else x for x in given)
    longest = spans[0][1]
    if codec.varies:
        answers = yield from all_gathered(codec, payload, longest)
    else:
        answers = yield AllGather(payload)
    for (start, stop), each in zip(spans, answers, strict=True):
        if start == stop:
            break
        if start + longest <= out.numel():
            # Entries after the end of a shorter one are overwritten by the next.
            codec.decode_(each, out[start : start + longest])
        else:
            mean = thread_scratch("mean", longest, request.x.dtype, request.x.device)
            codec.decode_(each, mean)
            out[start:stop] = mean[: stop - start]
    return out, sent


def _encoded_for_each(request: ReduceEncoded, spans: Spans) -> tuple[tuple[Payload, ...], Transmitted]:
    """The payload of each span, and what all of them hold."""
    codec, sizes = request.codec, request.codec.block_sizes(0)
    if sizes is None:
        payloads = encoded_spans(request, spans, [f"to{i}" for i in range(len(spans))])
        return payloads, _SentInStretches(codec, payloads, spans)
    whole, found = encoded(request), []  # in one launch, as spans begin where blocks do
    for _, stop in spans:
        start, sizes = sizes, codec.block_sizes(stop)
        assert sizes is not None
        found.append(tuple(part[a:b] for part, a, b in zip(whole, start, sizes, strict=True)))
    return tuple(found), codec.sent(whole, request.x)


def _encoded_again(
    codec: OneShot, ctx: Context, mean: Tensor, before: Tensor, after: Tensor
) -> tuple[Tensor, ...]:
    """Encode `mean` + `before` (the residual), padded, as all payloads have the shape of the longest."""
    short = before.numel()
    if short == mean.numel():
        return encoded(ReduceEncoded(codec, mean, ctx, before, after), part="again")
    padded = [thread_scratch(f"padded{i}", mean.numel(), before.dtype, mean.device) for i in range(2)]
    padded[0][:short] = before
    padded[0][short:] = 0
    before, new = padded
    payload = encoded(ReduceEncoded(codec, mean, ctx, before, new), part="again")
    after.copy_(padded[1][:short])
    return payload


def _within(spans: Spans, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of the spans from `start` to `stop`, counted from `start`."""
    for a, b in spans:
        if a < stop and b > start:
            yield max(a, start) - start, min(b, stop) - start


def _clear(x: Tensor, spans: list[tuple[int, int]]) -> None:
    """Set the spans to zero, as a sign cannot encode zero and others own these entries."""
    zero_each_([x[start:stop] for start, stop in spans])


@dataclass(frozen=True)
class _SentInStretches(Transmitted):
    codec: OneShot
    payloads: tuple[tuple[Tensor, ...], ...]
    spans: Spans

    def _each(self, whole: Tensor) -> Iterator[tuple[Transmitted, Tensor]]:
        for (start, stop), payload in zip(self.spans, self.payloads, strict=True):
            yield self.codec.sent(payload, whole[start:stop]), whole[start:stop]

    def subtract_from_(self, new_residual: Tensor) -> None:
        for sent, part in self._each(new_residual):
            sent.subtract_from_(part)

    def clear_(self, x: Tensor) -> None:
        for sent, part in self._each(x):
            sent.clear_(part)

    def dense(self, like: Tensor) -> Tensor:
        whole = like.new_empty(like.shape)
        for (start, stop), payload in zip(self.spans, self.payloads, strict=True):
            self.codec.decode_(payload, whole[start:stop])
        return whole


@lru_cache(1 << 10)
def _slices(numel: int, peers: int) -> Spans:
    """Spans of as many blocks each, or one less; the first is the longest, the last may be empty."""
    blocks, more = divmod(-(-numel // GRAIN), peers)
    cuts = [min((i * blocks + min(i, more)) * GRAIN, numel) for i in range(peers + 1)]
    return tuple(pairwise(cuts))


def _sliced(numel: int, peers: int, codec: OneShot) -> bool:
    """Whether ranks average slices: each of them one, or a few alone."""
    if -(-numel // GRAIN) >= peers:
        return peers > 1
    return numel * peers > GATHERED and codec.block_sizes(0) is not None and not codec.varies
