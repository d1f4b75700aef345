"""All-reduces of another shape than a backend's: direct, rings, halves, trees, a torus, rings of rings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from tacit import checks
from tacit.contracts import (
    NET,
    NODE,
    AllReduce,
    ByLinks,
    Compressor,
    Context,
    Exchange,
    LinkRates,
    Payload,
    Permute,
    Request,
    State,
)
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import divide_
from tacit.exchange.joined_requests import answered, conducted, summed_directly
from tacit.topologies import schedules
from tacit.topologies.flat import codecs_in, reduce_flat
from tacit.topologies.link_graphs import balanced_tree
from tacit.topologies.on_axis import OnAxis
from tacit.topologies.schedules import MessageSchedule


@dataclass(frozen=True)
class Sums(OnAxis):
    """An all-reduce by other requests, for compressors whose payloads add up, such as `Dense` and `PowerSGD`.

    Payloads are added in the type that is sent, as in the collectives of `Flat`.

    Attributes:
        axis: as of `Flat`.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True
    words: ClassVar[str]
    """Its name among shapes."""

    @abstractmethod
    def mean(self, request: AllReduce, ctx: Context) -> Generator[Request, Any, Payload]:
        """Overwrite the payload with the peers' mean."""

    def summary(self, compressors: Sequence[Compressor]) -> str:
        return f"{self.words}{' in each node' if self.axis == NODE else ''}"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return f"messages in a {self.words}"

    def check(self, compressor: Compressor) -> None:
        """Refuse codecs whose payloads do not add up."""
        super().check(compressor)
        for codec in codecs_in(compressor):
            if not codec.additive:
                raise _refusal(self, compressor, f"the payloads of {codec} do not add up")

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every `AllReduce` becomes what `mean` asks for."""

        def answer(request: Request) -> Generator[Request, Any, Payload]:
            if not isinstance(request, AllReduce):
                raise _refusal(self, compressor, f"it asks for {type(request).__name__}")
            return (yield from self.mean(request, ctx))

        exchange = compressor.exchange(x, state, ctx)
        exchange = conducted(exchange, "", reduce_flat, ctx.nonfinite_flags, ctx.finite_probe)
        return conducted(answered(exchange, answer), self.axis)


@dataclass(frozen=True)
class Direct(Sums):
    """Each rank sends all to every other one, which adds it up: one message, (P - 1) n bytes.

    The fewest round trips, and the most bytes: for few ranks, and small tensors on links of high latency. All
    add in the order of the ranks, so that they have the same bits.
    """

    words: ClassVar[str] = "direct"

    def mean(self, request: AllReduce, ctx: Context) -> Generator[Request, Any, Payload]:
        return (yield from summed_directly(request, ctx.peers))


@dataclass(frozen=True)
class Shape(Sums):
    """Messages between pairs of ranks, in the order of a schedule.

    Each sum is made by one rank and passed on, so that all ranks have the same bits.
    """

    @abstractmethod
    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        """The messages among `peers` ranks, for a tensor of `nbytes` bytes.

        Raises:
            ConfigError: it is for another number of ranks.
        """

    def mean(self, request: AllReduce, ctx: Context) -> Generator[Request, Any, Payload]:
        payload = request.payload
        numel, first = sum(tensor.numel() for tensor in payload), payload[0]
        ctx = ctx.inside(f"shape.{numel}.{first.dtype}")
        alone = len(payload) == 1 and first.is_contiguous()
        whole = first.view(-1) if alone else ctx.scratch("whole", first, (numel,), first.dtype)
        if not alone:
            for tensor, span in _laid(payload, whole):
                span.copy_(tensor.reshape(-1))
        divide_(whole, ctx.peers, request.finite_probe)  # before the sum, which might overflow
        schedule = self.schedule(ctx.peers, numel * first.element_size())
        yield from followed(schedule, whole, ctx, ctx.rank, tuple(schedule.edges(numel)))
        if not alone:
            for tensor, span in _laid(payload, whole):
                tensor.copy_(span.view(tensor.shape))
        return payload


def followed(
    schedule: MessageSchedule, x: Tensor, ctx: Context, rank: int, edges: tuple[int, ...]
) -> Generator[Request, Any, None]:
    """Take part in each round of the schedule with `x`, which becomes the sum.

    Args:
        rank: this one's, among the peers of the schedule.
        edges: the starts of the chunks in `x`, and the end of the last.
    """
    turns = _turns(schedule, rank, edges)
    longest = max((turn.into[1] - turn.into[0] for turn in turns if turn.adds), default=0)
    arrived = ctx.scratch("arrived", x, (longest,), x.dtype)
    for to, (start, stop), (begin, end), adds in turns:
        into = arrived[: end - begin] if adds else x[begin:end]
        yield Permute((x[start:stop],), to, into=(into,))
        if adds:
            x[begin:end].add_(into)


class _Turn(NamedTuple):
    """A rank's part in a round: the span that it sends, and the span to which it writes or adds what arrives.

    A rank that receives nothing has a span as long as the longest message, for the dry run.
    """

    to: tuple[int | None, ...]
    out: tuple[int, int]
    into: tuple[int, int]
    adds: bool


@lru_cache(1024)
def _turns(schedule: MessageSchedule, rank: int, edges: tuple[int, ...]) -> tuple[_Turn, ...]:
    """A rank's turns, for a tensor that is cut there, without empty messages on any rank."""
    turns = []
    for each in schedule.rounds:
        to: list[int | None] = [None] * schedule.peers
        out, into, adds = (0, 0), (0, max(edges[hop.stop] - edges[hop.start] for hop in each)), False
        for source, end, start, stop, added in each:
            span = edges[start], edges[stop]
            if span[0] == span[1]:
                continue
            to[source] = end
            if source == rank:
                out = span
            if end == rank:
                into, adds = span, added
        if any(end is not None for end in to):
            turns.append(_Turn(tuple(to), out, into, adds))
    return tuple(turns)


def _laid(payload: Payload, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the payload, with its part of the whole."""
    start = 0
    for tensor in payload:
        yield tensor, whole[start : start + tensor.numel()]
        start += tensor.numel()


def _refusal(shape: Sums, compressor: Compressor, why: str) -> ConfigError:
    return ConfigError(
        f"{compressor} cannot travel by {shape}, as {why}: write topology=Flat(), TwoPhase() or Auto(); or a "
        "compressor whose payloads add up, such as Dense(), BF16() or PowerSGD()"
    )


# ---- which -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring(Shape):
    """Each rank sends to the next: 2 (P - 1) messages of n / P (Patarasuk & Yuan 2009).

    The fewest bytes, 2 (P - 1) / P n, and the most messages after each other. Gloo's and NCCL's all-reduce of
    large tensors is this one.
    """

    words: ClassVar[str] = "ring"

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        return schedules.ring(peers)


@dataclass(frozen=True)
class HalvingDoubling(Shape):
    """Recursive halving, then doubling: 2 log2 P messages, 2 (P - 1) / P n bytes (Rabenseifner 2004).

    With P = 2^m + e ranks, e of them send half their tensor to a neighbour, take no part, and get the result:
    three messages more, of n / 2, n / 2 and n. Pairs are at distances 1, 2, 4, ..., with half as many bytes
    each time.
    """

    words: ClassVar[str] = "halving and doubling"

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        return schedules.halving_doubling(peers)


@dataclass(frozen=True)
class DoubleTree(Shape):
    """Two binary trees, each for half of the tensor, in pieces that follow each other.

    About 4 log2 P messages after each other, and four for each piece; a rank sends 2 n. Sanders, Speck &
    Traeff,
    Parallel Computing 35 (2009), as NCCL has it. Differences: the rounds of messages are found by trying one
    after the other, where the paper colours the edges. So 16 pieces take 65 rounds among 4 ranks and 90 among
    127, where four a piece are 64.

    Attributes:
        piece_bytes: the bytes of a half of a tensor in one message; at most 16 pieces a half.
    """

    piece_bytes: int = 1 << 18

    words: ClassVar[str] = "double tree"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("piece_bytes", self.piece_bytes, 1, None, "write 262144")

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        return schedules.double_tree(peers, min(max(1, nbytes // 2 // self.piece_bytes), _MOST_PIECES))


_MOST_PIECES = 16


@dataclass(frozen=True)
class LinkTree(Shape, ByLinks):
    """One tree, along the fastest links: sums go up to its root and come back, in pieces.

    For links that differ from pair to pair, as between sites: sums avoid slow links if possible. A rank sends
    n to its parent and n to each child, more than in a ring; so with equal links it is the slowest of the
    shapes.

    Attributes:
        parents: for each rank the next one towards the root, None for the root; empty: they are found by
            `link_graphs.balanced_tree` from the measured rates when the strategy is attached.
        piece_bytes: the bytes of a tensor in one message; at most 16 pieces.
    """

    parents: tuple[int | None, ...] = ()
    piece_bytes: int = 1 << 18

    words: ClassVar[str] = "tree by links"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole("piece_bytes", self.piece_bytes, 1, None, "write 262144")
        if not isinstance(self.parents, tuple) or not _is_tree(self.parents):
            raise ConfigError(
                f"parents={self.parents!r:.80} is no tree: write for each rank the one to which it sends, "
                "and None for one of them, such as (None, 0, 0, 1), or leave it out, to go by measured links"
            )

    @property
    def needs_rates(self) -> bool:
        """Whether it has no tree yet."""
        return not self.parents

    def for_rates(self, links: LinkRates) -> LinkTree:
        """The tree along the fastest of these links."""
        rates = links.matrix if self.axis == NET else links.of_ranks()
        return replace(self, parents=balanced_tree(rates).parents)

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        parents = self.parents or balanced_tree([[None] * peers] * peers).parents
        if len(parents) != peers:
            raise ConfigError(
                f"parents= has {len(parents)} ranks, and there are {peers}: write one for each, or leave "
                "it out"
            )
        return schedules.tree(parents, min(max(1, nbytes // self.piece_bytes), _MOST_PIECES))


def _is_tree(parents: tuple[object, ...]) -> bool:
    """Whether there is one root that all ranks lead to; True without ranks."""
    ranks = range(len(parents))
    if not all(each is None or (type(each) is int and each in ranks) for each in parents):
        return False
    above = {rank: each for rank, each in enumerate(parents) if isinstance(each, int)}
    for rank in ranks:
        for _ in ranks:
            rank = above.get(rank, rank)
        if rank in above:
            return False
    return len(above) == max(len(parents) - 1, 0)


@dataclass(frozen=True)
class Torus(Shape):
    """Ranks in rows and columns: reduce-scatter in rows, all-reduce in columns, all-gather in rows.

    2 (X - 1) + 2 (Y - 1) messages, 2 (P - 1) / P n bytes; between rows no more than 2 (Y - 1) / P n of each
    rank. Mikami et al. 2018 (arXiv 1811.05233).

    Attributes:
        sides: the number of rows, and of neighbouring ranks in each; empty: the two factors nearest to each
            other.
    """

    sides: tuple[int, ...] = ()

    words: ClassVar[str] = "torus"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers("sides", self.sides, (0, 2), "write (2, 4) for two rows of four ranks, or leave it out")

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        return schedules.torus(peers, self.sides)


@dataclass(frozen=True)
class BlueConnect(Shape):
    """Reduce-scatters over one level of the cluster after the other, then all-gathers back.

    With factors f, g, h a rank first exchanges with f neighbours, then n / f with the g ranks at its position
    in the next groups, then n / (f g) with h: out of a group of f ranks go 2 (g - 1) / g n bytes, and out of
    one of f g ranks 2 (h - 1) / h n, however many ranks there are in it. So it is the hierarchy of any number
    of
    levels: GPUs of a node, nodes of a rack, racks. Cho, Finkler, Serrano, Kung & Hunter, MLSys 2019.
    Difference: each level is a ring; the paper takes the fastest algorithm there.

    Attributes:
        factors: the ranks of a node, the nodes of a rack, and so on, with neighbours first; empty: the prime
            factors of the number of ranks, the smallest first.
    """

    factors: tuple[int, ...] = ()

    words: ClassVar[str] = "rings by level"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(
            "factors", self.factors, None, "write (8, 4, 2) for two racks of four nodes of eight ranks"
        )

    def schedule(self, peers: int, nbytes: int) -> MessageSchedule:
        return schedules.blueconnect(peers, self.factors)


def check_numbers(name: str, given: object, counts: Sequence[int] | None, hint: str) -> None:
    """Refuse a value that is no tuple of whole numbers from 1 on; `counts`: the allowed lengths."""
    fits = isinstance(given, tuple) and all(type(each) is int and each >= 1 for each in given)
    if not fits or (counts is not None and isinstance(given, tuple) and len(given) not in counts):
        raise ConfigError(f"{name}={given!r} cannot be: {hint}")
