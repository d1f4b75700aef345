"""Trees and graphs for links of different rates: which ranks exchange with which, and with which weights.

A matrix has the rate from each rank (row) to each rank (column), in any unit; None: unknown, which counts as
infinitely fast. Two ranks send in both directions, so the slower direction counts.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tacit.errors import ConfigError

Rates: TypeAlias = Sequence[Sequence[float | None]]
Weights: TypeAlias = tuple[tuple[float, ...], ...]

FAST = 0.5
"""Links of this share of the typical rate, and faster ones, are used by gossip."""


@dataclass(frozen=True)
class Tree:
    """A tree over ranks, for a broadcast from the root, or in reverse for a reduction.

    Attributes:
        root: the rank at the root.
        parents: for each rank the next one towards the root; None for the root.
    """

    root: int
    parents: tuple[int | None, ...]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of parent and child."""
        return tuple((parent, child) for child, parent in enumerate(self.parents) if parent is not None)

    def order(self) -> tuple[int, ...]:
        """The ranks, each after its parent: in this order a broadcast reaches them."""
        children: list[list[int]] = [[] for _ in self.parents]
        for parent, child in self.edges:
            children[parent].append(child)
        found, waiting = [], deque([self.root])
        while waiting:
            found.append(waiting.popleft())
            waiting.extend(children[found[-1]])
        return tuple(found)

    def bottleneck(self, rates: Rates) -> float:
        """The rate of its slowest link; infinite for one rank."""
        links = symmetric(rates)
        return min((links[a][b] for a, b in self.edges), default=math.inf)


def spanning_tree(rates: Rates, root: int = 0) -> Tree:
    """The tree whose slowest link is as fast as that of any tree: a maximum spanning tree (Prim 1957).

    Its path between any two ranks is also the one whose slowest link is the fastest. Of equally fast links it
    takes those that keep it flat, and then those of lower ranks, so that it is equal on all ranks.

    Raises:
        ConfigError: the matrix is not square, has a rate that cannot be, or there is no such root.
    """
    links = symmetric(rates)
    count = len(links)
    if root not in range(count):
        raise ConfigError(f"root={root} is no rank of {count}: write one from 0 to {count - 1}")
    parents: list[int | None] = [None] * count
    depth = [0] * count
    reached, waiting = {root}, [(-links[root][j], 1, root, j) for j in range(count) if j != root]
    heapq.heapify(waiting)
    while len(reached) < count:
        _, level, parent, child = heapq.heappop(waiting)
        if child in reached:
            continue
        reached.add(child)
        parents[child], depth[child] = parent, level
        for other in range(count):
            if other not in reached:
                heapq.heappush(waiting, (-links[child][other], level + 1, child, other))
    return Tree(root, tuple(parents))


def balanced_tree(rates: Rates) -> Tree:
    """A tree for sums that go up it and come back: of links as fast as can be, and of few children.

    Rates within a factor of the root of two count as equal. With them no tree has a faster slowest link; of
    equally fast links those are taken whose upper end has less than two children, and which leave the tree
    flat. The root is the rank whose links are the fastest.

    Raises:
        ConfigError: the matrix is not square, or has a rate that cannot be.
    """
    links = symmetric(rates)
    count = len(links)
    classes = [[rate if rate == math.inf else round(2 * math.log2(rate)) for rate in row] for row in links]
    root = max(range(count), key=lambda i: (sorted(each for j, each in enumerate(classes[i]) if j != i), -i))
    parents: list[int | None] = [None] * count
    depth, children, reached = [0] * count, [0] * count, [root]
    while len(reached) < count:
        parent, child = min(
            ((i, j) for i in reached for j in range(count) if j not in reached),
            key=lambda pair: (-classes[pair[0]][pair[1]], children[pair[0]] >= 2, depth[pair[0]], *pair),
        )
        parents[child], depth[child] = parent, depth[parent] + 1
        children[parent] += 1
        reached.append(child)
    return Tree(root, tuple(parents))


def gossip_weights(rates: Rates) -> Weights:
    """A doubly stochastic matrix for gossip that keeps to fast links, and still connects all ranks.

    Its graph has the links of at least half the typical rate, which is the median of the ranks' fastest
    links; and of the others those of the best spanning tree, which connect what would be separated. Weights
    are Metropolis': W_ij = 1 / (1 + max(d_i, d_j)), where d are the numbers of neighbours (Xiao, Boyd & Kim
    2007). Those of slow links are less, down to a quarter. The rest of a row is the rank's weight for itself.
    So slow links are used only if there is no other path. They carry as many bytes as others, whatever their
    weight.

    Raises:
        ConfigError: the matrix is not square, or has a rate that cannot be.
    """
    links = symmetric(rates)
    count = len(links)
    if count == 1:
        return ((1.0,),)
    typical = _typical(links)
    used = {(i, j) for i in range(count) for j in range(i) if links[i][j] >= FAST * typical}
    used |= {(max(edge), min(edge)) for edge in spanning_tree(rates).edges}
    degree = [sum(rank in pair for pair in used) for rank in range(count)]
    weights = [[0.0] * count for _ in range(count)]
    for i, j in used:
        speed = min(1.0, links[i][j] / typical)
        weights[i][j] = weights[j][i] = max(_LEAST, speed) / (1 + max(degree[i], degree[j]))
    for i, row in enumerate(weights):
        row[i] = 1.0 - math.fsum(row)
    return tuple(map(tuple, weights))


def _typical(links: list[list[float]]) -> float:
    """The median of each rank's fastest link, of those that are known: a slow rank makes all of its slow."""
    known = [
        [rate for j, rate in enumerate(row) if j != i and rate < math.inf] for i, row in enumerate(links)
    ]
    return statistics.median([max(each) for each in known if each] or [1.0])


_LEAST = 0.25
"""The least share of its weight that a slow link keeps: with less, what it connects would hardly agree."""


def symmetric(rates: Rates) -> list[list[float]]:
    """The rate of the slower direction of each link; infinite if unknown.

    Raises:
        ConfigError: the matrix is not square, or has a rate that cannot be.
    """
    count = len(rates)
    if not count or any(len(row) != count for row in rates):
        raise ConfigError(
            f"rates of {count} rows, with {[len(row) for row in rates]} numbers, are no square matrix: give "
            "a row for each rank, with a rate to each rank"
        )
    for i, row in enumerate(rates):
        for j, rate in enumerate(row):
            if i != j and rate is not None and not rate > 0:
                raise ConfigError(
                    f"the rate from {i} to {j} is {rate}: give one above 0, or None where nothing is known"
                )
    links = [[math.inf if rate is None else float(rate) for rate in row] for row in rates]
    return [[min(links[i][j], links[j][i]) for j in range(count)] for i in range(count)]
