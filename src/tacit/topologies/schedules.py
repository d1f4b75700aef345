"""All-reduces as data: in each round, the chunks that ranks send to each other, and whether they are added.

A schedule cuts a tensor into chunks. One function for each shape makes it; `topologies.shapes` runs any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from tacit.errors import ConfigError

_MOST_HOPS = 4_000_000
"""The most hops of a schedule: half a million take more than 20 seconds to make."""
_KEPT = 16
"""The number of cached schedules of each shape: those of large clusters have a million hops."""


class Hop(NamedTuple):
    """One message of a round: chunks from `start` to `stop` go from one rank to another.

    Attributes:
        adds: whether they are added to those of the receiver; else they overwrite them.
    """

    source: int
    end: int
    start: int
    stop: int
    adds: bool


Round: TypeAlias = tuple[Hop, ...]
"""Simultaneous hops: a rank sends at most one, and receives at most one."""


@dataclass(frozen=True, eq=False)
class MessageSchedule:
    """An all-reduce: afterwards each rank holds the sum of all ranks' chunks, in the same bits.

    In a round a rank sends what it held at its beginning.

    Attributes:
        peers: the number of ranks.
        chunks: the number of equal parts of the tensor.
        rounds: the rounds, one after the other.
    """

    peers: int
    chunks: int
    rounds: tuple[Round, ...]

    def edges(self, numel: int) -> list[int]:
        """The starts of the chunks of `numel` elements, and the end of the last; some may be empty."""
        return [numel * i // self.chunks for i in range(self.chunks + 1)]


# ---- by the digits of a rank --------------------------------------------------------------------------


@lru_cache(_KEPT)
def ring(peers: int) -> MessageSchedule:
    """Each rank sends to the next one: P - 1 rounds in which chunks are added, P - 1 in which sums go on."""
    return by_factors(peers, (peers,))


@lru_cache(_KEPT)
def blueconnect(peers: int, factors: tuple[int, ...] = ()) -> MessageSchedule:
    """A ring over each digit of the rank's number, the first factor counting neighbours (BlueConnect).

    Raises:
        ConfigError: the factors do not multiply to the number of ranks.
    """
    factors = factors or found_factors(peers)
    refuse_product("BlueConnect", "factors", factors, peers)
    return by_factors(peers, factors)


@lru_cache(_KEPT)
def torus(peers: int, sides: tuple[int, ...] = ()) -> MessageSchedule:
    """Rows of `sides[1]` neighbours, `sides[0]` of them: row, column and row again (2-D torus).

    Raises:
        ConfigError: the sides do not multiply to the number of ranks.
    """
    rows, columns = sides or found_sides(peers)
    refuse_product("Torus", "sides", (rows, columns), peers)
    return by_factors(peers, (columns, rows))


def by_factors(peers: int, factors: Sequence[int]) -> MessageSchedule:
    """Reduce-scatters over one digit of the rank after the other, then all-gathers back.

    Raises:
        ConfigError: the schedule would have too many messages.
    """
    hops = 2 * sum(factor - 1 for factor in factors) * peers
    if hops > _MOST_HOPS:
        raise ConfigError(
            f"rings of {max(factors)} take {hops} messages among {peers} ranks, and a schedule can have "
            f"{_MOST_HOPS}: write HalvingDoubling(), or BlueConnect() with smaller factors"
        )
    down, up = by_levels(peers, tuple(factors))
    return MessageSchedule(peers, peers, (*down.rounds, *up.rounds))


@lru_cache(_KEPT)
def by_levels(peers: int, factors: tuple[int, ...]) -> tuple[MessageSchedule, MessageSchedule]:
    """The halves of `by_factors`; between them each rank has the sum of the chunk that `chunk_of` names."""
    down, up = _scatter_and_gather(range(peers), factors, peers)
    return MessageSchedule(peers, peers, tuple(down)), MessageSchedule(peers, peers, tuple(up))


def chunk_of(rank: int, factors: Sequence[int]) -> int:
    """The chunk that a rank has between the halves of `by_levels`: the digits of its number in reverse."""
    chunk = 0
    for factor in factors:
        rank, digit = divmod(rank, factor)
        chunk = chunk * factor + digit
    return chunk


def found_factors(peers: int) -> tuple[int, ...]:
    """The prime factors of the number of ranks, the smallest first."""
    found, rest, prime = [], peers, 2
    while rest > 1:
        while rest % prime == 0:
            found.append(prime)
            rest //= prime
        prime += 1 if prime * prime <= rest else rest - prime if rest > prime else 1
    return tuple(found) or (1,)


def found_sides(peers: int) -> tuple[int, int]:
    """The two factors nearest to each other, the smaller first."""
    rows = next(side for side in range(math.isqrt(peers), 0, -1) if peers % side == 0)
    return rows, peers // rows


def refuse_product(shape: str, what: str, given: Sequence[int], peers: int) -> None:
    """Refuse numbers that do not multiply to the number of ranks; the message suggests some."""
    if math.prod(given) == peers:
        return
    fits = found_sides(peers) if what == "sides" else found_factors(peers)
    raise ConfigError(
        f"{shape}({what}={tuple(given)}) is for {math.prod(given)} ranks, and there are {peers}: write "
        f"{what}={tuple(fits)}, or leave {what} out"
    )


def _scatter_and_gather(
    ranks: Sequence[int], factors: Sequence[int], chunks: int
) -> tuple[list[Round], list[Round]]:
    """Rounds after which each rank owns the sum of its chunks, and rounds that bring these to all."""
    down: list[Round] = []
    levels: list[list[Round]] = []
    whole: dict[int, tuple[int, int]] = dict.fromkeys(range(len(ranks)), (0, chunks))
    stride = 1
    for factor in factors:
        groups = [
            [first + digit * stride for digit in range(factor)]
            for first in range(len(ranks))
            if first // stride % factor == 0
        ]
        shares = {group[0]: _parts(*whole[group[0]], factor) for group in groups}
        down += _in_rings(ranks, groups, shares, adds=True)
        levels.append(_in_rings(ranks, groups, shares, adds=False))
        for group in groups:
            whole.update(zip(group, shares[group[0]], strict=True))
        stride *= factor
    return down, [each for level in reversed(levels) for each in level]


def _parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    size = stop - start
    return list(pairwise(start + size * i // count for i in range(count + 1)))


def _in_rings(
    ranks: Sequence[int],
    groups: Sequence[Sequence[int]],
    shares: dict[int, list[tuple[int, int]]],
    adds: bool,
) -> list[Round]:
    """The rounds of simultaneous rings; member i of each owns the i-th share when adding ends."""
    size = len(groups[0])
    return [
        tuple(
            Hop(
                ranks[member],
                ranks[group[(i + 1) % size]],
                *shares[group[0]][(i - step - adds) % size],
                adds,
            )
            for group in groups
            for i, member in enumerate(group)
        )
        for step in range(size - 1)
    ]


# ---- halves --------------------------------------------------------------------------------------------


@lru_cache(_KEPT)
def halving_doubling(peers: int) -> MessageSchedule:
    """Pairs at distances 1, 2, 4, ... swap halves of what is left, and then go back (Rabenseifner).

    Of P = 2^m + e ranks the first 2 e form pairs: both swap halves of the tensor and add them up, then the
    second one sends its half to the first, takes no part, and receives the result.
    """
    core = 1 << peers.bit_length() - 1
    extra = peers - core
    chunks = core
    half = chunks // 2
    pairs = [(2 * i, 2 * i + 1) for i in range(extra)]
    swap = [(Hop(a, b, half, chunks, True), Hop(b, a, 0, half, True)) for a, b in pairs]
    before = [
        tuple(hop for both in swap for hop in both),
        tuple(Hop(b, a, half, chunks, False) for a, b in pairs),
    ]
    after = [tuple(Hop(a, b, 0, chunks, False) for a, b in pairs)]
    ranks = [*range(0, 2 * extra, 2), *range(2 * extra, peers)]
    down, up = _scatter_and_gather(ranks, (2,) * (core.bit_length() - 1), chunks)
    rounds = [*before, *down, *up, *after] if extra else [*down, *up]
    return MessageSchedule(peers, chunks, tuple(rounds))


# ---- trees ---------------------------------------------------------------------------------------------


class _Task(NamedTuple):
    """A hop of a tree.

    Attributes:
        after: the indices of the hops that must be made before it.
        piece: the number of its piece of the tree's half of the tensor.
    """

    hop: Hop
    after: tuple[int, ...]
    piece: int


@lru_cache(_KEPT)
def double_tree(peers: int, pieces: int = 1) -> MessageSchedule:
    """Two binary trees, each for half of the tensor, in `pieces` that follow each other.

    In both, sums go up to the root and come back. A rank has children in one tree and is a leaf in the other
    (or, the root, has one child), so that all ranks send about as much (Sanders, Speck & Traeff 2009). Of two
    orders of trying hops, the one with fewer rounds is taken: piece by piece, those with the most hops after
    them first; or reductions before broadcasts.
    """
    trees = [_tree(peers), [_mirrored(parent, peers) for parent in _tree(peers)[::-1]]]
    if peers % 2:  # mirrored, the leaves would be the same: the second is the first, one rank further
        trees[1] = [_shifted(_tree(peers)[rank - 1], peers) for rank in range(peers)]
    tasks: list[_Task] = []
    for piece in range(pieces):
        for number, parents in enumerate(trees):
            _add_tree(tasks, parents, number * pieces + piece, piece)
    return MessageSchedule(peers, 2 * pieces, _fewest_rounds(tasks))


@lru_cache(_KEPT)
def tree(parents: tuple[int | None, ...], pieces: int = 1) -> MessageSchedule:
    """Sums go up the tree of `parents`, and come back, in `pieces`."""
    tasks: list[_Task] = []
    for piece in range(pieces):
        _add_tree(tasks, parents, piece, piece)
    return MessageSchedule(len(parents), pieces, _fewest_rounds(tasks))


def _fewest_rounds(tasks: Sequence[_Task]) -> tuple[Round, ...]:
    """The hops of trees, by the better of two orders."""
    behind = _behind(tasks)
    by_way = sorted(range(len(tasks)), key=lambda i: (2 * tasks[i].piece - behind[i], i))
    sums_first = sorted(
        range(len(tasks)), key=lambda i: (not tasks[i].hop.adds, tasks[i].piece, -behind[i], i)
    )
    found: list[tuple[Round, ...]] = [tuple(_packed(tasks, order)) for order in (by_way, sums_first)]
    return min(found, key=len)


def _tree(peers: int) -> list[int | None]:
    """The parent of each rank: rank 0 is the root; the lower its last bit, the nearer to the leaves."""
    parents: list[int | None] = [None]
    for rank in range(1, peers):
        bit = rank & -rank
        above = (rank - bit) | 2 * bit
        parents.append(above if above < peers else rank - bit)
    return parents


def _mirrored(parent: int | None, peers: int) -> int | None:
    return None if parent is None else peers - 1 - parent


def _shifted(parent: int | None, peers: int) -> int | None:
    return None if parent is None else (parent + 1) % peers


def _add_tree(tasks: list[_Task], parents: Sequence[int | None], chunk: int, piece: int) -> None:
    """The hops of one chunk: each rank to its parent, after its children's, and then back."""
    below: list[list[int]] = [[] for _ in parents]
    for rank, parent in enumerate(parents):
        if parent is not None:
            below[parent].append(rank)

    def add(source: int, end: int, after: Sequence[int], adds: bool) -> int:
        tasks.append(_Task(Hop(source, end, chunk, chunk + 1, adds), tuple(after), piece))
        return len(tasks) - 1

    def up(rank: int) -> list[int]:
        return [add(child, rank, up(child), True) for child in below[rank]]

    def back(rank: int, after: Sequence[int]) -> None:
        for child in below[rank]:
            back(child, [add(rank, child, after, False)])

    root = parents.index(None)
    back(root, up(root))


def _packed(tasks: Sequence[_Task], left: Sequence[int]) -> Iterator[Round]:
    """Pack as many hops into a round as possible, in this order: each rank sends once and receives once."""
    made: set[int] = set()
    while left:
        sending: set[int] = set()
        receiving: set[int] = set()
        taken: set[int] = set()
        for i in left:
            hop = tasks[i].hop
            free = hop.source not in sending and hop.end not in receiving
            if free and made.issuperset(tasks[i].after):
                taken.add(i)
                sending.add(hop.source)
                receiving.add(hop.end)
        made |= taken
        left = [i for i in left if i not in taken]
        yield tuple(tasks[i].hop for i in sorted(taken))


def _behind(tasks: Sequence[_Task]) -> list[int]:
    """For each hop, the length of the longest chain of hops that it begins."""
    behind = [1] * len(tasks)
    for i in range(len(tasks) - 1, -1, -1):  # prerequisites have lower indices
        for before in tasks[i].after:
            behind[before] = max(behind[before], behind[i] + 1)
    return behind
