"""Describe a cluster: nodes, ranks, and the links between the nodes, for the testbed and the planner.

The text form is what users write after ``--cluster``:

    2x2@100mbit       2 nodes of 2 ranks, every node's link carries 100 Mbit/s each way
    4x1@1gbit,20ms    the same, and a message between nodes takes 20 ms more, one way
    2x2               links as fast as the machine allows
    local:4           4 processes on this machine, no emulated network
    4x1+1@100mbit     4 nodes of 1 rank, and 1 parameter server, which has a node of its own
    nodes=[3x1@1gbit,1x1@100mbit]    links of different rates: 3 nodes of 1 rank, and a slower one
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby

from tacit.errors import ConfigError

__all__ = ["Cluster"]

_RATES = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(10**3)}
_TIMES = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_UNITS = {**_RATES, **_TIMES}
_COUNT = r"(\d{1,100})"  # Python refuses to read a number of thousands of digits
_SHAPE = re.compile(rf"{_COUNT}x{_COUNT}(?:\+{_COUNT})?", re.ASCII)
_LOCAL = re.compile(rf"local:{_COUNT}(?:\+{_COUNT})?", re.ASCII)
_UNEVEN = re.compile(r"nodes=\[(.*)\]")
_GROUP = re.compile(rf"{_COUNT}(?:x{_COUNT})?@([^,@]+)", re.ASCII)
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)", re.ASCII)
_MOST_NODES = 1023
"""As many ports has a bridge of Linux."""
_MOST_RANKS = 4096
_MOST_PLANNED = 1 << 20
_EXAMPLES = (
    "Write for example 2x2@100mbit (2 nodes of 2 ranks, 100 Mbit/s links), 4x1@1gbit,20ms (with latency), "
    "2x2 (links at full speed) or local:4 (4 plain local processes)."
)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size, each with one link to a switch.

    Attributes:
        nodes: How many nodes.
        ranks_per_node: How many ranks run on each node.
        rate: What a node's link carries, in bit/s each way; None leaves it at full speed.
        latency: What a message between two nodes takes longer, in seconds, one way.
        namespaces: Whether nodes are network namespaces; False means plain processes on this machine.
        servers: How many parameter servers stand beside the nodes, each on one of its own.
        rates: What each node's link carries, where they differ; `rate` is then None.
    """

    nodes: int
    ranks_per_node: int
    rate: float | None = None
    latency: float = 0.0
    namespaces: bool = True
    servers: int = 0
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values that no cluster can have."""
        for what, count in (("nodes", self.nodes), ("ranks per node", self.ranks_per_node)):
            if count < 1:
                raise ConfigError(f"a cluster cannot have {count} {what}: at least 1 is needed. {_EXAMPLES}")
        if self.servers < 0:
            raise ConfigError(f"a cluster cannot have {self.servers} servers: write 0 or more. {_EXAMPLES}")
        if self.world_size > _MOST_PLANNED:
            raise ConfigError(
                f"a cluster cannot have {self.world_size:,} ranks: write up to {_MOST_PLANNED:,}. {_EXAMPLES}"
            )
        for rate in (*self.rates, *([] if self.rate is None else [self.rate])):
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"a link cannot carry {rate} bit/s: the rate must be above 0. {_EXAMPLES}")
        if self.rates and (len(self.rates) != self.nodes or self.rate is not None):
            raise ConfigError(
                f"{self.nodes} nodes cannot have {len(self.rates)} rates"
                f"{'' if self.rate is None else ' and another for all'}: give one for each node, and no "
                f"other. {_EXAMPLES}"
            )
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ConfigError(f"a latency cannot be {self.latency} s: it must be 0 or more. {_EXAMPLES}")
        if not self.namespaces and (self.nodes > 1 or self.shaped):
            raise ConfigError(
                "plain local processes are one node without links, so they have no rate and no latency. "
                f"Leave namespaces=True for more. {_EXAMPLES}"
            )

    def check_emulated(self) -> None:
        """Check that it is small enough for one machine to emulate it.

        Raises:
            ConfigError: it has too many nodes or ranks.
        """
        if self.places > _MOST_NODES:
            raise ConfigError(
                f"{self.places:,} nodes, with those of its servers, cannot be emulated: a bridge of Linux, "
                f"which joins them, takes {_MOST_NODES:,}. {_EXAMPLES}"
            )
        if self.world_size > _MOST_RANKS:
            raise ConfigError(
                f"{self.world_size:,} ranks cannot be emulated: each is a process with a PyTorch of its "
                f"own, some 200 MB, and {_MOST_RANKS:,} are the most. {_EXAMPLES}"
            )

    @property
    def places(self) -> int:
        """How many nodes there are with those of the servers, which come behind the others."""
        return self.nodes + self.servers

    @property
    def shaped(self) -> bool:
        """Whether its links have a rate or a latency."""
        return self.rate is not None or bool(self.rates) or self.latency > 0

    def rate_of(self, place: int) -> float | None:
        """What the link of a node carries; that of a server is as fast as the fastest of them."""
        if not self.rates:
            return self.rate
        return self.rates[place] if place < self.nodes else max(self.rates)

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read the text form, for example ``2x2@100mbit``; `str` gives it back."""
        if local := _LOCAL.fullmatch(text.strip().lower()):
            return cls(1, int(local[1]), namespaces=False, servers=int(local[2] or 0))
        if uneven := _UNEVEN.fullmatch(text.strip().lower()):
            return _uneven(uneven[1], text)
        head, at, tail = text.strip().lower().partition("@")
        shape = _SHAPE.fullmatch(head)
        if shape is None:
            raise ConfigError(f"cannot read {head!r} as NODESxRANKS in the cluster {text!r}. {_EXAMPLES}")
        rate, latency = _link(tail, text) if at else (None, 0.0)
        return cls(int(shape[1]), int(shape[2]), rate, latency, servers=int(shape[3] or 0))

    def __str__(self) -> str:
        """The canonical text form."""
        if self.rates:
            groups = ((rate, len([*same])) for rate, same in groupby(self.rates))
            parts = (f"{count}x{self.ranks_per_node}@{_written(rate, _RATES)}" for rate, count in groups)
            return f"nodes=[{','.join(parts)}]"
        beside = f"+{self.servers}" if self.servers else ""
        if not self.namespaces:
            return f"local:{self.ranks_per_node}{beside}"
        link = [_written(self.rate, _RATES)] if self.rate is not None else []
        link += [_written(self.latency, _TIMES)] if self.latency else []
        return f"{self.nodes}x{self.ranks_per_node}{beside}" + ("@" + ",".join(link) if link else "")


def _uneven(text: str, whole: str) -> Cluster:
    """Read ``COUNTxRANKS@RATE,COUNTxRANKS@RATE``."""
    groups = [_GROUP.fullmatch(word.strip()) for word in text.split(",")]
    if not all(groups):
        raise ConfigError(
            f"cannot read {text!r} in the cluster {whole!r}: write nodes=[3x1@1gbit,1x1@100mbit], which are "
            "3 nodes of 1 rank and a slower one"
        )
    found = [(int(group[1]), int(group[2] or 1), group[3]) for group in groups if group is not None]
    rates: list[float] = []
    for count, _, words in found:
        rate, latency = _link(words, whole)
        if rate is None or latency or count > _MOST_PLANNED:
            raise ConfigError(f"cannot read {words!r} as a rate in the cluster {whole!r}. {_EXAMPLES}")
        rates += [rate] * count
    if len({ranks for _, ranks, _ in found}) > 1:
        raise ConfigError(
            f"the nodes of {whole!r} differ in their ranks, which is not possible: give all of them as many"
        )
    return Cluster(len(rates), found[0][1], rates=tuple(rates))


def _link(text: str, whole: str) -> tuple[float | None, float]:
    """Read ``RATE``, ``LATENCY`` or ``RATE,LATENCY``."""
    rate: float | None = None
    latency: float | None = None
    for word in text.split(","):
        value, unit = _quantity(word, whole)
        if unit in _RATES and rate is None and latency is None:
            rate = value
        elif unit in _TIMES and latency is None:
            latency = value
        else:
            raise ConfigError(
                f"cannot read {text!r} in the cluster {whole!r}: after @ comes one rate, then one latency. "
                f"{_EXAMPLES}"
            )
    return rate, latency or 0.0


def _quantity(word: str, whole: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(word.strip())
    if match is None:
        raise ConfigError(
            f"cannot read {word!r} as a number with a unit in the cluster {whole!r}. {_EXAMPLES}"
        )
    number, unit = match.groups()
    if unit not in _UNITS:
        raise ConfigError(
            f"unknown unit {unit!r} in the cluster {whole!r}. "
            f"Rates are in kbit, mbit or gbit (per second), latencies in us, ms or s. {_EXAMPLES}"
        )
    return float(Decimal(number) * _UNITS[unit]), unit


def _written(value: float, units: dict[str, Decimal]) -> str:
    """A quantity in the largest unit that leaves at least 1, with all the digits that it needs."""
    exact = Decimal(repr(float(value)))
    unit = next((unit for unit, scale in units.items() if exact >= scale), list(units)[-1])
    return f"{(exact / units[unit]).normalize():f}{unit}"
