"""What the links of a cluster carry, as it was measured: between all nodes, and within each."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeAlias

from tacit.described import Duration, Positive, Saved, Whole
from tacit.errors import ConfigError

__all__ = ["MATRICES", "Links", "Matrix", "places_of", "shown"]

Matrix: TypeAlias = tuple[tuple[Duration | None, ...], ...]
MATRICES = ("latency", "rate", "rate_of_flows", "rate_both_ways")
"""The fields of `Links` that have a value for each link."""
_SLOW = 0.75
"""A link below this share of the median is called slow."""
_FAR, _PLACED = 1e-3, 4.0
"""Seconds from which on a latency may be that between two places; by what factor it is above those inside."""
_MORE = 1.25
"""Several streams that carry so many times as much as one show that one does not fill the link."""
LOSSY, _SOME = 2e-3, 2e-4
"""The share of segments sent again that shows losses: full queues, which lose some, too, led to 9e-4; and of
every node a share that does where rates are uneven, which full queues do not make them."""


@dataclass(frozen=True)
class Links(Saved):
    """Latency and rate of each link, from each node (row) to each node (column).

    The diagonal is within a node, between two of its ranks; None where it has one rank.

    Attributes:
        hosts: the name of each node's host.
        ranks: the ranks of each node.
        latency: seconds of a message of few bytes, one way.
        rate: bit/s of one stream of messages.
        rate_of_flows: bit/s of several at once, together.
        rate_both_ways: bit/s of one stream while another comes back.
        flows: how many streams `rate_of_flows` has.
        backend: what carried the messages, such as "gloo".
        date: when it was measured, ISO 8601.
        resent: the share of segments of TCP that each node sent again meanwhile.
    """

    what: ClassVar[str] = "measured links"
    made_by: ClassVar[str] = "tacit probe"

    hosts: tuple[str, ...]
    ranks: tuple[tuple[Whole, ...], ...]
    latency: Matrix
    rate: Matrix
    rate_of_flows: Matrix
    rate_both_ways: Matrix
    flows: Positive
    backend: str
    date: str
    resent: tuple[Duration, ...] = ()

    def check(self) -> None:
        """Refuse fields that are not of as many nodes, and a link that carries nothing."""
        nodes = len(self.hosts)
        if len(self.ranks) != nodes:
            raise ValueError(f"it has {nodes} hosts and the ranks of {len(self.ranks)} nodes")
        if len(self.resent) not in (0, nodes):
            raise ValueError(f"it has {nodes} hosts and what {len(self.resent)} nodes have sent again")
        for name in MATRICES:
            matrix: Matrix = getattr(self, name)
            if [len(row) for row in matrix] != [nodes] * nodes:
                raise ValueError(f"its {name} is no matrix of {nodes} x {nodes}")
            for i, row in enumerate(matrix):
                for j, value in enumerate(row):
                    if value == 0 or (value is None and i != j):
                        raise ValueError(f"its {name} from node {i} to node {j} is {value}")

    def check_layout(self, nodes: Sequence[Sequence[int]]) -> None:
        """Check that these links are of a cluster of such nodes.

        Raises:
            ConfigError: they are of another.
        """
        if [list(node) for node in nodes] != [list(node) for node in self.ranks]:
            raise ConfigError(
                f"the links were measured on {_layout(self.ranks)}, and this run has {_layout(nodes)}: "
                "measure them again with tacit probe, or torchrun ... -m tacit.probe"
            )

    def between(self, matrix: Matrix, but: Collection[tuple[int, int]] = ()) -> list[float]:
        """A matrix's entries between different nodes, `but` for some, from and to."""
        return [
            value
            for i, row in enumerate(matrix)
            for j, value in enumerate(row)
            if i != j and value is not None and (i, j) not in but
        ]

    def slow(self) -> list[tuple[int, int]]:
        """The links between nodes, from and to, whose rate is under three quarters of the median's."""
        rates = self.between(self.rate)
        if not rates:
            return []
        limit = _SLOW * statistics.median(rates)
        return [
            (i, j)
            for i, row in enumerate(self.rate)
            for j, value in enumerate(row)
            if i != j and value is not None and value < limit
        ]

    def places(self) -> list[list[int]]:
        """Groups of nodes with far less latency inside than between any two groups; one if there are none."""
        return places_of(self.latency)

    def _latency(self, i: int, j: int) -> float:
        return self.latency[i][j] or 0.0

    def __str__(self) -> str:
        """Tables of rates and latencies, and what stands out."""
        lines = [f"{_layout(self.ranks)}: {', '.join(self.hosts)}; by {self.backend}"]
        titles = {
            "rate": "Mbit/s, one stream, from row to column (within a node on the diagonal)",
            "rate_of_flows": f"Mbit/s, {self.flows} streams at once",
            "rate_both_ways": "Mbit/s, both ways at once",
        }
        for name, title in titles.items():
            lines += ["", title, *_table(getattr(self, name), 1e-6)]
        lines += ["", "Latency in ms, one way", *_table(self.latency, 1e3)]
        return "\n".join([*lines, "", *self._findings()])

    def _findings(self) -> list[str]:
        rates, slow = self.between(self.rate), self.slow()
        if not rates:
            return ["There is one node, so no link between nodes."]
        found = [
            f"Between nodes: {_mbit(min(rates))} to {_mbit(max(rates))} Mbit/s, "
            f"{1e3 * statistics.median(self.between(self.latency)):.2f} ms (median)."
        ]
        if slow:
            names = ", ".join(f"{i} to {j} ({_mbit(self.rate[i][j] or 0.0)})" for i, j in slow[:8])
            found.append(f"Slower than three quarters of the median: {names}{', ...' * (len(slow) > 8)}.")
        found += self._of_places()
        gain, lost = _gain(self.between(self.rate_of_flows), rates), max(self.resent, default=0.0)
        if gain > _MORE:
            found.append(
                f"{self.flows} streams carry {gain:.1f} times as much as one: one connection does not fill "
                "the link. Where tacit is attached, write TACIT_CONNECTIONS=4; for plain DDP "
                "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0, with the interface's name, and bucket_cap_mb=4."
            )
        few = bool(slow) and min(self.resent, default=0.0) > _SOME
        if lost > LOSSY or few:
            found.append(
                f"Up to {100 * lost:.2g} % of a node's segments were sent again"
                f"{', of each some, and rates are uneven' if lost <= LOSSY else ''}: packets are lost"
                f"{', or the queue of a slow link is full' if lost <= LOSSY else ''}. Where few "
                "of them may be, BBR fills a link (sysctl -w net.ipv4.tcp_congestion_control=bbr)."
            )
        elif gain <= _MORE and _gain(self.between(self.rate_both_ways), rates) < 0.7:
            found.append(
                "Both ways at once a link carries clearly less each way: it is shared (half duplex)."
            )
        return found

    def _of_places(self) -> list[str]:
        """Where nodes are in several places: which, and the topology that goes by them."""
        places = self.places()
        if len(places) == 1:
            return []
        sizes, ranks = {len(each) for each in places}, {len(each) for each in self.ranks}
        inside = [self._latency(i, j) for each in places for i in each for j in each if i != j]
        groups = "; ".join(f"nodes {_joined(each)}" for each in places)
        found = (
            f"There are {len(places)} places: {groups}. Latency is {1e3 * max(inside):.2g} ms at most inside "
            f"and {1e3 * min(self._latency(i, j) for i in places[0] for j in places[1]):.3g} between."
        )
        if len(sizes) == len(ranks) == 1:
            found += (
                " topology=hierarchical, as in bf16:topology=hierarchical, averages inside them first: it "
                "saves round trips and sends more, so measure both (at 100 Mbit/s it was slower, at 1 Gbit/s "
                "faster)."
            )
        return [found]


def places_of(latency: Matrix) -> list[list[int]]:
    """Groups of nodes with far less latency inside than between any two groups; one if there are none."""
    nodes = range(len(latency))
    far = {(i, j): max(latency[i][j] or 0.0, latency[j][i] or 0.0) for i in nodes for j in nodes if i < j}
    ranked = sorted(far.values())
    gap, near = max(((b / a, a) for a, b in pairwise(ranked) if b >= _FAR), default=(1.0, 0.0))
    found: list[list[int]] = []
    for i in nodes:
        home = next((each for each in found if far[each[0], i] <= near), None)
        if home is None:
            found.append([i])
        else:
            home.append(i)
    where = {i: number for number, each in enumerate(found) for i in each}
    apart = all((where[i] == where[j]) == (seconds <= near) for (i, j), seconds in far.items())
    return found if gap >= _PLACED and apart else [[*nodes]]


def _joined(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes))


def _gain(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def _layout(nodes: Sequence[Sequence[int]]) -> str:
    sizes = {len(node) for node in nodes}
    each = f"{min(sizes)}" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)}"
    ranks = "rank" if sizes == {1} else "ranks"
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)} of {each} {ranks}"


def _table(matrix: Matrix, scale: float) -> list[str]:
    head = " " * 6 + "".join(f"{j:>9}" for j in range(len(matrix)))
    return [
        head,
        *(f"{i:>6}" + "".join(_cell(value, scale) for value in row) for i, row in enumerate(matrix)),
    ]


def _cell(value: float | None, scale: float) -> str:
    return f"{shown(value, scale):>9}"


def shown(value: float | None, scale: float) -> str:
    """A value times `scale`, to three digits; whole numbers from 1000 on; a dash for None."""
    if value is None:
        return "–"
    scaled = value * scale
    return f"{scaled:.0f}" if scaled >= 1000 else f"{scaled:.3g}"


def _mbit(rate: float) -> str:
    return shown(rate, 1e-6)
