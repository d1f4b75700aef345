"""Each rank averages with a small group, which is another one in each round (WAGMA, Prague)."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import (
    WORLD,
    Compressor,
    Context,
    Exchange,
    MixingCompressor,
    MixingTopology,
    Permute,
    ReduceEncoded,
    Request,
    State,
    Transmitted,
)
from tacit.errors import ConfigError
from tacit.exchange.error_feedback import encoded, transmitted
from tacit.exchange.joined_requests import conducted
from tacit.topologies.flat import reduce_flat
from tacit.topologies.mixing import (
    bits_of,
    check_group_size,
    check_whole,
    global_rounds,
    group_size_for,
    is_global,
)

Drawing: TypeAlias = Literal["butterfly", "random"]
Partners: TypeAlias = tuple[int | None, ...]
"""For each rank, the rank that it averages with; None: none."""


@dataclass(frozen=True)
class Groups(MixingTopology):
    """In each round the ranks are cut into groups, and each group takes its mean.

        x_i <- 1 / S * sum of x_j over the group of i

    A group is averaged by recursive doubling: in log2(S) messages each rank swaps its tensor with another one
    of its group, so that it sends n log2(S) of n bytes. The groups of a round follow from its number, and
    from the seed where they are drawn; all ranks know them without a message.

    The ranks of a group wait for each other, as in every average that does not take old values. And as the
    messages of a round are one operation of the process group, a late rank delays the others too, by one
    message. So this sends less than an all-reduce of all, and is not what WAGMA calls wait-avoiding, where a
    late rank's last values are used instead. That is `Pairs("butterfly")`.

    Attributes:
        group_size: S, a power of two. None: the one nearest to the square root of the number of ranks
            (Li et al. 2020).
        drawing: how groups are formed. "butterfly": in round t those whose ranks differ in the bits t log2(S)
            and following of their numbers, counted around, so that after log2(P) / log2(S) rounds each rank
            has
            something of every other (WAGMA: Li et al., arXiv 2005.00124); for a power of two of ranks.
            "random": drawn anew in each round (Prague: Luo et al., ASPLOS 2020); where the ranks cannot be
            cut into groups of S, what is left makes smaller ones.
        global_every: every so many rounds all ranks are averaged; 0: never.
        equal: refuse so many ranks as cannot be cut into groups of S; else what is left makes smaller ones.
    """

    on_device: ClassVar[bool] = True
    encodes_first: ClassVar[bool] = True

    group_size: int | None = None
    drawing: Drawing = "butterfly"
    global_every: int = 0
    equal: bool = False

    def __post_init__(self) -> None:
        checks.one_of("drawing", self.drawing, get_args(Drawing))
        checks.whole("global_every", self.global_every, 0, None, "write 0 for never")
        checks.flag("equal", self.equal)
        check_group_size(self.group_size)

    def summary(self, compressors: Sequence[Compressor]) -> str:
        """A few words on the groups."""
        size = "" if self.group_size is None else f" of {self.group_size}"
        return f"{self.drawing} groups{size}{global_rounds(self.global_every)}"

    def collectives(self, compressors: Sequence[Compressor]) -> str:
        return "messages in groups"

    def check(self, compressor: Compressor) -> None:
        """Refuse lossy compressors, as their error would be lost."""
        super().check(compressor)
        if isinstance(compressor, MixingCompressor):
            self._check_changing(compressor)
            return
        check_whole(compressor, self, "every group", "or BF16()")

    def _check_changing(self, compressor: MixingCompressor) -> None:
        """Refuse compressors that need fixed neighbours, or that send a weight."""
        given = f"{compressor} with topology={self} is not possible, as"
        if compressor.fixed_graph:
            raise ConfigError(
                f"{given} it keeps the sum of what its neighbours have sent, and groups are others in each "
                'round: write topology=Gossip("ring")'
            )
        if self.global_every:
            raise ConfigError(
                f"{given} a mean of all is not made of what it keeps: leave global_every out, and call "
                "session.sync() for a mean of all"
            )

    def check_ranks(self, peers: int) -> None:
        self.swaps(peers, 0)

    def conduct(self, x: Tensor, compressor: Compressor, state: State, ctx: Context) -> Exchange:
        """Every average that the compressor asks for is taken in this rank's group of the round."""
        swaps = self.swaps(ctx.peers, ctx.round, ctx.seed)

        def mix(request: ReduceEncoded) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
            return _doubled(request, swaps, ctx.rank)

        reduce = reduce_flat if is_global(self.global_every, ctx) else mix
        return conducted(compressor.exchange(x, state, ctx), WORLD, reduce, ctx.nonfinite_flags)

    def swaps(self, peers: int, round_index: int, seed: int = 0) -> tuple[Partners, ...]:
        """The swaps, message by message; after the last one each rank has its group's mean.

        Raises:
            ConfigError: this number of ranks cannot be cut into such groups.
        """
        size = group_size_for(self.group_size, peers)
        if self.equal and peers % size:
            raise ConfigError(
                f"groups of {size} with {peers} ranks are not possible, as some would be left: train with "
                f"{peers - peers % size} or {peers - peers % size + size} ranks, or attach 'diloco' or "
                "'prague', which take any number"
            )
        if self.drawing == "random":
            return _in_groups(_drawn(peers, size, f"{seed}/{round_index}"), peers)
        bits = bits_of(peers, "drawing='butterfly'", "drawing='random' (or attach prague)")
        phases = size.bit_length() - 1
        first = round_index * phases
        masks = [1 << (first + phase) % bits for phase in range(phases)]
        return tuple(tuple(rank ^ mask for rank in range(peers)) for mask in masks)

    def rows(self, peers: int, round_index: int, seed: int = 0) -> tuple[tuple[float, ...], ...]:
        """The weights W_ij of rank j in the mean of rank i in this round."""
        w = torch.eye(peers, dtype=torch.float64)
        for partners in self.swaps(peers, round_index, seed):
            others = [rank if partner is None else partner for rank, partner in enumerate(partners)]
            w = (w + w[others]) / 2
        return tuple(tuple(row) for row in w.tolist())


def _drawn(peers: int, size: int, seed: str) -> list[list[int]]:
    """The ranks in random groups of this size; the rest in groups of the largest powers of two."""
    ranks = [*range(peers)]
    random.Random(seed).shuffle(ranks)
    groups = []
    while ranks:
        while size > len(ranks):
            size //= 2
        groups.append(ranks[:size])
        ranks = ranks[size:]
    return groups


def _in_groups(groups: Sequence[Sequence[int]], peers: int) -> tuple[Partners, ...]:
    """Recursive doubling in each of the groups, at the same time."""
    phases = max(map(len, groups)).bit_length() - 1
    swaps: list[list[int | None]] = [[None] * peers for _ in range(phases)]
    for group in groups:
        for phase in range(len(group).bit_length() - 1):
            for place, rank in enumerate(group):
                swaps[phase][rank] = group[place ^ (1 << phase)]
    return tuple(map(tuple, swaps))


def _doubled(
    request: ReduceEncoded, swaps: Sequence[Partners], me: int
) -> Generator[Request, Any, tuple[Tensor, Transmitted]]:
    """Average with one rank after the other; this rank's tensor is encoded again for each."""
    codec, work, out = request.codec, request.ctx, request.ctx.out
    payload = encoded(request)
    mixed, theirs = (work.scratch(name, out, out.shape, out.dtype) for name in ("mixed", "theirs"))
    codec.decode_(payload, mixed)
    sent = transmitted(request, payload)
    for number, partners in enumerate(swaps):
        leaving = payload
        if number:
            leaving = codec.encode(mixed, work)
            codec.decode_(leaving, mixed)  # as the others decode it, so that no mean drifts by rounding
        answer = yield Permute(leaving, partners)
        if answer is not None:
            codec.decode_(answer, theirs)
            mixed.add_(theirs).mul_(0.5)
    out.copy_(mixed)
    return out, sent
