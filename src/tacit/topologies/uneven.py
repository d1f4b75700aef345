"""Averages in unequal spans: a rank with a slow link averages less, or nothing, for the others."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from tacit.contracts import (
    NET,
    AllToAll,
    ByLinks,
    Compressor,
    Context,
    Exchange,
    LinkRates,
    ReduceEncoded,
    Request,
    Spans,
    State,
    Transmitted,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.exchange.finite_checks import probe_
from tacit.exchange.joined_requests import conducted, mean_in_few_launches_
from tacit.kernels.dispatch import on_host, warmed_up_for
from tacit.topologies.flat import reduce_flat
from tacit.topologies.on_axis import OnAxis

MOST_CHUNKS = 32
"""The most chunks of a tensor: each message of an exchange has separate connections."""
CHUNK_BYTES = 8 << 10
"""The bytes that take about as long as the fixed cost of a message."""
LAUNCHED_CHUNK_BYTES = 512 << 10
"""The same on a GPU, where the host launches a dozen kernels for a message; estimated, not measured."""
_UNKNOWN_RATE = 1e9


@dataclass(frozen=True)
class Uneven(OnAxis, ByLinks):
    """Each rank averages a span of the tensor for all ranks, the longer the faster its link is.

    Of n elements on P ranks, rank i owns s_i. It sends n - s_i elements to the other owners, and its mean to
    P - 1 ranks: n + (P - 2) s_i in all, and gets as many. The spans are those for which the busiest link is
    done first: `cut`. A rank whose link is slow owns nothing, and sends n and gets n, where a ring has all
    ranks send 2 (P - 1) / P n. So with one slow link a step of 4 ranks waits for 2 / 3 of the bytes, of many
    ranks for half.

    Both halves go on at once, as a link carries as much each way: the tensor is cut into chunks, and each
    message has this rank's part of a chunk and the mean of the chunk before. Of k chunks that takes k + 1
    messages. Between two of them a link idles until all ranks have the first, so buckets are small and
    several are under way (`bucket_bytes`).

    The mean is the mean of payloads, in fp32 or wider, added in the order of the ranks. For compressors whose
    payload is one tensor with an element for each entry, and adds up: `Dense`, `BF16`, `FP16`. Shares by
    bandwidth are those of BytePS (Jiang et al., OSDI 2020), there of servers. Messages have separate buffers
    for all that is sent and received: 2 n + 2 (P - 2) s_i elements a rank.

    Attributes:
        axis: as of `Flat`.
        rates: bit/s of each rank's link, in the order of the ranks on the axis. (): they are measured when
            the strategy is attached, and until then taken for equal.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True
    bucket_bytes: ClassVar[int] = 4 << 20  # as the parts of BytePS

    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.rates, tuple) or not all(map(_is_rate, self.rates)):
            raise ConfigError(
                f"rates={self.rates!r:.80} are no rates of links: write a tuple of bit/s above 0, one for "
                "each rank, such as (1e9, 1e9, 1e8); or leave it out, to have them measured"
            )

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on how it differs from two phases."""
        return "unequal spans, by the links' rates"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "all-to-all, in unequal spans"

    def check(self, compressor: Compressor) -> None:
        """Refuse compressors whose payload cannot be cut and averaged element by element."""
        super().check(compressor)
        self.fields(compressor)

    def fields(self, compressor: Compressor) -> tuple[str, ...]:
        """No fields; refuses what `check` refuses, also of a policy's compressors."""
        for step in (0, *compressor.changes):
            use = compressor.one_shot(step)
            if use is None or not (use.codec.additive and use.codec.entrywise):
                raise ConfigError(
                    f"compressor={compressor} with topology={self} is not possible, as ranks average spans "
                    f"of its payload, which must be one tensor with an element for each entry that "
                    "adds up: write Dense() or BF16(), or topology=Auto()"
                )
        return ()

    @property
    def needs_rates(self) -> bool:
        """Whether the rates are unknown."""
        return not self.rates

    def for_rates(self, links: LinkRates) -> Uneven:
        """This topology with each rank's rate: its share of its node's link in both directions at once."""
        rates = links.of_nodes()
        if self.axis == NET:
            return replace(self, rates=rates)
        shared = {rank: rates[i] / len(node) for i, node in enumerate(links.nodes) for rank in node}
        return replace(self, rates=tuple(shared[rank] for rank in sorted(shared)))

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """The compressor's exchange, whose payload is averaged in spans."""
        rates = self._rates(ctx.peers)

        def reduce(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
            if ctx.peers == 1:
                return (yield from reduce_flat(request))
            payload = encoded(request)
            if ctx.finite_probe is not None:
                probe_(payload[0], ctx.finite_probe[:1])
            yield from _average_(payload[0], rates, ctx.rank)
            request.codec.decode_(payload, request.ctx.out)
            return request.ctx.out, transmitted(request, payload)

        return conducted(compressor.exchange(x, state, ctx), self.axis, reduce, ctx.nonfinite_flags)

    def _rates(self, peers: int) -> tuple[float, ...]:
        if self.rates and len(self.rates) != peers:
            raise ConfigError(
                f"rates= has {len(self.rates)} rates, and there are {peers} ranks on the axis {self.axis!r}: "
                "write one for each, or leave them out, to have them measured"
            )
        return self.rates or (_UNKNOWN_RATE,) * peers


def _average_(flat: Tensor, rates: Sequence[float], me: int) -> Generator[Request, Any, None]:
    """Overwrite `flat` with the peers' mean: chunk by chunk, each chunk's mean one message later."""
    spans = cut(flat.numel(), rates)
    launched = warmed_up_for() == "cuda" if flat.is_meta else not on_host(flat)
    count = chunks(flat.numel() * flat.element_size(), launched)
    pieces = [[flat[start:stop] for start, stop in _chunks(span, count)] for span in spans]
    for k in range(count + 1):
        reducing, gathering = _numbered(pieces, k), _numbered(pieces, k - 1)
        mine, done = reducing[me], gathering[me]
        leaving = tuple((*part, *done) if i != me else () for i, part in enumerate(reducing))
        arriving = tuple((*mine, *part) if i != me else () for i, part in enumerate(gathering))
        answers: Sequence[tuple[Tensor, ...]] = yield AllToAll(leaving, arriving=arriving)
        for piece in mine:
            _average_piece_(piece, [each[0] if i != me else piece for i, each in enumerate(answers)])
        for i, part in enumerate(gathering):
            for piece in part if i != me else ():
                piece.copy_(answers[i][-1])


def _numbered(pieces: Sequence[Sequence[Tensor]], k: int) -> list[tuple[Tensor, ...]]:
    """Chunk k of each owner's span; empty if there is no such chunk."""
    return [(each[k],) if 0 <= k < len(each) else () for each in pieces]


def _average_piece_(piece: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the mean to `piece`, which may be one of the parts."""
    if not on_host(piece):
        mean_in_few_launches_(parts, piece)
        return
    kind = torch.promote_types(piece.dtype, torch.float32)
    mean = parts[0].to(kind, copy=True).div_(len(parts))  # before the sum, which might overflow
    for part in parts[1:]:
        mean.add_(part, alpha=1 / len(parts))
    piece.copy_(mean)


# ---- the lengths of spans ------------------------------------------------------------------------


def cut(numel: int, rates: Sequence[float]) -> Spans:
    """The spans with which the busiest link is done earliest; equal ones for equal rates.

    Rank i sends and gets n + (P - 2) s_i elements, so that all are done after T if s_i <= (T r_i - n) /
    (P - 2). These add up to n for T = 2 (P - 1) n / (r_1 + ... + r_P), but no link is done before n / r_i.
    Where the slowest link decides, the others share the tensor by what they have left.
    """
    peers = len(rates)
    equal = _rounded(numel, [1.0] * peers)
    if peers < 3:
        return equal
    least = max(1 / min(rates), 2 * (peers - 1) / math.fsum(rates))
    found = _rounded(numel, [max(0.0, least * rate - 1) for rate in rates])
    return min(equal, found, key=lambda spans: seconds(spans, rates))


def seconds(spans: Spans, rates: Sequence[float]) -> float:
    """The seconds of the busiest link, if an element is one bit."""
    numel = spans[-1][1]
    busy = [numel + (len(spans) - 2) * (stop - start) for start, stop in spans]
    return max(each / rate for each, rate in zip(busy, rates, strict=True))


def chunks(nbytes: int, launched: bool = False) -> int:
    """The number of chunks of a tensor; `launched`: on a GPU.

    The first of k chunks is only sent, and the last only received, which takes 1 / k longer. And each chunk
    is a message. The square root balances both, for messages that cost as much as `CHUNK_BYTES`.
    """
    fixed = LAUNCHED_CHUNK_BYTES if launched else CHUNK_BYTES
    return max(1, min(MOST_CHUNKS, round(math.sqrt(nbytes / fixed))))


def _rounded(numel: int, shares: Sequence[float]) -> Spans:
    """Spans in proportion to shares, with rounded ends."""
    ends = [*accumulate(shares)]
    return tuple(pairwise([0, *(round(numel * end / ends[-1]) for end in ends[:-1]), numel]))


def _chunks(span: tuple[int, int], count: int) -> Spans:
    start, stop = span
    return tuple(pairwise(start + (stop - start) * k // count for k in range(count + 1)))


def _is_rate(rate: object) -> bool:
    return isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
