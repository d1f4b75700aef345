"""Describe a cluster: nodes, ranks, and the links between the nodes, for the testbed and the planner.

The text form is what users write after ``--cluster``:

* ``2x2@100mbit``: 2 nodes of 2 ranks, every node's link carries 100 Mbit/s each way.
* ``4x1@1gbit,20ms``: the same, and what a node sends arrives 20 ms later.
* ``4x1@100mbit,5ms±2ms``: 3 to 7 ms later, by chance, so packets overtake each other (also ``5ms+-2ms``).
* ``4x1@100mbit,30ms,0.1%loss``: one packet of a thousand that a node sends is lost.
* ``4x1@100mbit,mtu=1280``: packets of at most 1,280 bytes, as in a VPN's tunnel.
* ``4x1@100mbit,1ms,2places=30ms``: the first half of the nodes at one place, the rest 30 ms away.
* ``4x1@100mbit,nat``: nobody can open a connection to a node but the first, as behind a home router.
* ``2x2``: links as fast as the machine allows.
* ``local:4``: 4 processes on this machine, no emulated network.
* ``4x1+1@100mbit``: 4 nodes of 1 rank, and 1 parameter server, on a separate node.
* ``4x1@100mbit+load=20mbit``: every node also sends 20 Mbit/s of something else.
* ``nodes=[3x1@1gbit,1x1@100mbit]``: links that differ: 3 nodes of 1 rank, and a slower one.
* ``nodes=[2@1gbit,2@100mbit,5ms+load=20mbit]``: 2 nodes of 2 ranks; the second is slower, later and busy.

After ``nodes=`` an entry is ``RANKS@RATE`` for one node, or ``COUNTxRANKS@RATE`` for several that are alike.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import groupby
from typing import Any

from tacit.errors import ConfigError
from tacit_lab.impairment import EXAMPLES, HEADERS, NAT, Impairment

_RATES = {"gbit": Decimal(10**9), "mbit": Decimal(10**6), "kbit": Decimal(10**3)}
_TIMES = {"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6")}
_UNITS = {**_RATES, **_TIMES}
_SPREAD = "±"
_COUNT = r"(\d{1,100})"  # Python refuses to read a number of thousands of digits
_SHAPE = re.compile(rf"{_COUNT}x{_COUNT}(?:\+{_COUNT})?", re.ASCII)
_LOCAL = re.compile(rf"local:{_COUNT}(?:\+{_COUNT})?", re.ASCII)
_UNEVEN = re.compile(rf"nodes=\[(.*)\](?:\+{_COUNT})?")
_GROUP = re.compile(rf"(?:{_COUNT}x)?{_COUNT}@([^@+]+)(?:\+load=([^@+]+))?", re.ASCII)
_LOAD = "+load="
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)", re.ASCII)
_LOSS = re.compile(r"(\d+(?:\.\d+)?)%loss", re.ASCII)
_SITES = re.compile(rf"{_COUNT}places=(.*)", re.ASCII)
_MTU = re.compile(r"mtu=(\d{1,9})", re.ASCII)
_MOST_NODES = 1023
"""As many ports has a bridge of Linux."""
_MOST_RANKS = 4096
_MOST_PLANNED = 1 << 20
_SLOWEST, _FASTEST = 1e3, 34e9
_EARLIEST, _LATEST = 1e-6, 240.0
"""What the kernel's shapers can do: bit/s with their least burst, and seconds."""
_LEAST_TRIP = 1e-3
_UNEVEN_EXAMPLES = (
    "Write for example nodes=[3x1@1gbit,1x1@100mbit] (3 nodes of 1 rank and a slower one), or "
    "nodes=[2@1gbit,2@100mbit,20ms+load=10mbit] (2 nodes of 2 ranks; the second with latency, and with "
    "10 Mbit/s that something else sends)."
)


_PERFECT = Impairment()


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size, each with one link to a switch.

    Attributes:
        nodes: How many nodes.
        ranks_per_node: How many ranks run on each node.
        rate: What a node's link carries, in bit/s each way; None leaves it at full speed.
        latency: The seconds that a message between two nodes takes longer, one way.
        namespaces: Whether nodes are network namespaces; False means plain processes on this machine.
        servers: The number of parameter servers, each on an additional node.
        rates: The rate of each node's link, if they differ; `rate` is then None.
        latencies: The latency of each node's link, if they differ; `latency` is then 0.
        load: The background traffic out of each node, in bit/s of its link.
        loads: The background traffic of each node, if it differs; `load` is then 0.
        impairment: What else the links do to packets: loss, jitter, MTU.
        impairments: That of each node's link, if they differ; `impairment` then does nothing.
        sites: At how many places the nodes are, as many at each, one after another in turn; servers at the
            first.
        apart: The latency between two of them, where there are several.

    Of equal `rates`, `latencies`, `loads` or `impairments` it makes one for all.
    """

    nodes: int
    ranks_per_node: int
    rate: float | None = None
    latency: float = 0.0
    namespaces: bool = True
    servers: int = 0
    rates: tuple[float, ...] = ()
    latencies: tuple[float, ...] = ()
    load: float = 0.0
    loads: tuple[float, ...] = ()
    impairment: Impairment = _PERFECT
    impairments: tuple[Impairment, ...] = ()
    sites: int = 1
    apart: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that no cluster can have."""
        for what, count in (("nodes", self.nodes), ("ranks per node", self.ranks_per_node)):
            if count < 1:
                raise ConfigError(f"a cluster cannot have {count} {what}: at least 1 is needed. {EXAMPLES}")
        if self.servers < 0:
            raise ConfigError(f"a cluster cannot have {self.servers} servers: write 0 or more. {EXAMPLES}")
        if self.world_size > _MOST_PLANNED:
            raise ConfigError(
                f"a cluster cannot have {self.world_size:,} ranks: write up to {_MOST_PLANNED:,}. {EXAMPLES}"
            )
        self._make_one_of_equal("rate", "rates", None)
        self._make_one_of_equal("latency", "latencies", 0.0)
        self._make_one_of_equal("load", "loads", 0.0)
        self._make_one_of_equal("impairment", "impairments", _PERFECT)
        for rate in (*self.rates, *([] if self.rate is None else [self.rate])):
            if not (math.isfinite(rate) and rate > 0):
                raise ConfigError(f"a link cannot carry {rate} bit/s: the rate must be above 0. {EXAMPLES}")
        for latency in (*self.latencies, self.latency):
            if not (math.isfinite(latency) and latency >= 0):
                raise ConfigError(f"a latency cannot be {latency} s: it must be 0 or more. {EXAMPLES}")
        self._check_loads()
        self._check_sites()
        for node in range(self.nodes if self.impairments or self.latencies else 1):
            jitter, latency = self.impairment_of(node).jitter, self.latency_of(node)
            if jitter > latency:
                raise ConfigError(
                    f"a jitter of {_written(jitter, _TIMES)} is more than the latency of "
                    f"{_written(latency, _TIMES) if latency else 'none'}, and no packet arrives before it "
                    f"was sent: write less. {EXAMPLES}"
                )
        if not self.namespaces and (self.nodes > 1 or self.shaped or self.loaded):
            raise ConfigError(
                "plain local processes are one node without links, so they have no rate, no latency and no "
                f"load. Leave namespaces=True for more. {EXAMPLES}"
            )
        if (self.latencies or self.loads or self.impairments) and self.rate_of(0) is None:
            raise ConfigError(
                "nodes whose latency, load or loss differs need a rate each, as their text form names one. "
                f"{_UNEVEN_EXAMPLES}"
            )

    def _make_one_of_equal(self, one: str, each: str, none: float | Impairment | None) -> None:
        """Have equal values of the nodes stand in the field for all, so that one cluster is one value."""
        values = getattr(self, each)
        if not values:
            return
        if len(values) != self.nodes or getattr(self, one) != none:
            raise ConfigError(
                f"{self.nodes} nodes cannot have {len(values)} {each}"
                f"{'' if getattr(self, one) == none else f' and a {one} for all'}: give one for each node, "
                f"and no other. {_UNEVEN_EXAMPLES}"
            )
        if len({*values}) == 1:
            object.__setattr__(self, one, values[0])
            object.__setattr__(self, each, ())

    def _check_loads(self) -> None:
        for node in range(self.nodes if self.loads else 1):
            load, rate = self.load_of(node), self.rate_of(node)
            if not (math.isfinite(load) and load >= 0):
                raise ConfigError(f"a load cannot be {load} bit/s: it must be 0 or more. {_UNEVEN_EXAMPLES}")
            slowest = min(self.rates) if self.rates and not self.loads else rate
            if slowest is not None and load >= slowest:
                raise ConfigError(
                    f"a load of {_written(load, _RATES)} leaves nothing of a link of "
                    f"{_written(slowest, _RATES)}: write less. {_UNEVEN_EXAMPLES}"
                )

    def _check_sites(self) -> None:
        if self.sites == 1 and not self.apart:
            return
        if self.sites < 2 or self.nodes % self.sites:
            raise ConfigError(
                f"{self.nodes} nodes cannot be at {self.sites} places: write 2 or more of them, with as many "
                f"nodes at each. {EXAMPLES}"
            )
        if self.latencies or not self.latency < self.apart < math.inf:
            raise ConfigError(
                f"a latency of {_written(self.apart, _TIMES)} between places cannot be: it must be more than "
                f"inside them, which is {_written(self.latency, _TIMES)}, and all nodes must have that. "
                f"{EXAMPLES}"
            )

    def check_emulated(self) -> None:
        """Check that it is small enough for one machine to emulate it.

        Raises:
            ConfigError: it has too many nodes or ranks, or a link that the kernel cannot shape.
        """
        if self.places > _MOST_NODES:
            raise ConfigError(
                f"{self.places:,} nodes, with those of its servers, cannot be emulated: a bridge of Linux, "
                f"which joins them, takes {_MOST_NODES:,}. {EXAMPLES}"
            )
        if self.world_size > _MOST_RANKS:
            raise ConfigError(
                f"{self.world_size:,} ranks cannot be emulated: each is a process that loads PyTorch, some "
                f"200 MB, and {_MOST_RANKS:,} are the most. {EXAMPLES}"
            )
        for rate in (*self.rates, *([] if self.rate is None else [self.rate])):
            if not _SLOWEST <= rate <= _FASTEST:
                raise ConfigError(
                    f"a link of {_written(rate, _RATES)} cannot be emulated, as the kernel counts bytes a "
                    f"second, and how long a packet takes, in 32 bits: write {_written(_SLOWEST, _RATES)} to "
                    f"{_written(_FASTEST, _RATES)}, or no rate for links at full speed. {EXAMPLES}"
                )
        for latency in (*self.latencies, self.latency, self.apart):
            if latency and not _EARLIEST <= latency <= _LATEST:
                raise ConfigError(
                    f"a latency of {_written(latency, _TIMES)} cannot be emulated, as the kernel counts "
                    f"microseconds in 32 bits: write {_written(_EARLIEST, _TIMES)} to "
                    f"{_written(_LATEST, _TIMES)}, or none. {EXAMPLES}"
                )

    @property
    def places(self) -> int:
        """The number of nodes, including those of the servers, which come last."""
        return self.nodes + self.servers

    @property
    def shaped(self) -> bool:
        """Whether its links have a rate or a latency, or another impairment."""
        shaped = self.rate is not None or bool(self.rates or self.latencies) or self.latency > 0
        return shaped or self.sites > 1 or self.impaired

    @property
    def impaired(self) -> bool:
        """Whether its links lose packets, or differ in another way from perfect ones."""
        return bool(self.impairments) or self.impairment != _PERFECT

    @property
    def loaded(self) -> bool:
        """Whether something else sends on its links."""
        return self.load > 0 or bool(self.loads)

    def rate_of(self, place: int) -> float | None:
        """The rate of a node's link; a server's is that of the fastest node."""
        if not self.rates:
            return self.rate
        return self.rates[place] if place < self.nodes else max(self.rates)

    def latency_of(self, place: int) -> float:
        """The latency of a node's link, in seconds; a server's is that of the node with the lowest."""
        if not self.latencies:
            return self.latency
        return self.latencies[place] if place < self.nodes else min(self.latencies)

    def site_of(self, place: int) -> int:
        """The place, of `sites`, that a node or server is at."""
        return place * self.sites // self.nodes if place < self.nodes else 0

    @property
    def most_latency(self) -> float:
        """The highest latency that a message between two nodes has."""
        return max(self.latency, self.apart, *self.latencies)

    @property
    def pace(self) -> float:
        """Bytes a second of one connection where packets are lost, of the slowest; infinite where none are.

        TCP Reno's, which nodes have here: payload of a packet / round trip x sqrt(1.5 / loss) (Mathis
        et al. 1997). Measured in docs/network.md: 2.3 Mbit/s at 30 ms and 1 %, where this says 2.4.
        """
        slowest = math.inf
        for node in range(self.nodes if self.impairments or self.latencies else 1):
            impairment = self.impairment_of(node)
            if impairment.loss:
                trip = self.most_latency + max(self.latency_of(node), self.apart)
                payload = impairment.mtu - HEADERS
                slowest = min(slowest, payload / max(trip, _LEAST_TRIP) * math.sqrt(1.5 / impairment.loss))
        return slowest

    def load_of(self, place: int) -> float:
        """The background traffic out of a node, in bit/s; a server has none."""
        if place >= self.nodes:
            return 0.0
        return self.loads[place] if self.loads else self.load

    def impairment_of(self, place: int) -> Impairment:
        """What else a node's link does to packets; a server's is that of the node that loses fewest.

        Without a NAT: servers, and the first node of nodes that are alike, where all meet.
        """
        if self.impairments:
            found = self.impairments[place] if place < self.nodes else min(self.impairments)
        else:
            found = self.impairment
        return replace(found, nat=found.nat and self.nodes > place >= (0 if self.impairments else 1))

    def free_rate_of(self, place: int) -> float | None:
        """The rate of a node's link without the load; None: it has no rate."""
        rate = self.rate_of(place)
        return None if rate is None else rate - self.load_of(place)

    @property
    def world_size(self) -> int:
        """How many ranks there are in all."""
        return self.nodes * self.ranks_per_node

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Read the text form, for example ``2x2@100mbit``; `str` gives it back."""
        if local := _LOCAL.fullmatch(text.strip().lower()):
            return cls(1, int(local[1]), namespaces=False, servers=int(local[2] or 0))
        plain = text.strip().lower().replace("+-", _SPREAD)
        if uneven := _UNEVEN.fullmatch(plain):
            return _uneven(uneven[1], int(uneven[2] or 0), text)
        if _LOCAL.match(plain):
            raise ConfigError(
                f"cannot read the cluster {text!r}, as plain local processes have no links, and so no rate, "
                f"latency, loss or load. {EXAMPLES}"
            )
        if plain.startswith("nodes="):
            raise ConfigError(f"cannot read the cluster {text!r}. {_UNEVEN_EXAMPLES}")
        words, loaded, busy = plain.partition(_LOAD)
        head, at, tail = words.partition("@")
        shape = _SHAPE.fullmatch(head)
        if shape is None:
            raise ConfigError(f"cannot read {head!r} as NODESxRANKS in the cluster {text!r}. {EXAMPLES}")
        link = _link(tail, text) if at else {}
        load = _load(busy, text) if loaded else 0.0
        return cls(int(shape[1]), int(shape[2]), servers=int(shape[3] or 0), load=load, **link)

    def __str__(self) -> str:
        """The canonical text form."""
        beside = f"+{self.servers}" if self.servers else ""
        if self.rates or self.latencies or self.loads or self.impairments:
            groups = groupby(self._link_text(node) for node in range(self.nodes))
            parts = (f"{len([*same])}x{self.ranks_per_node}{link}" for link, same in groups)
            return f"nodes=[{','.join(parts)}]{beside}"
        if not self.namespaces:
            return f"local:{self.ranks_per_node}{beside}"
        return f"{self.nodes}x{self.ranks_per_node}{beside}{self._link_text(0)}"

    def _link_text(self, node: int) -> str:
        """The text after a node: its rate, latency, impairment and load."""
        rate, latency, load = self.rate_of(node), self.latency_of(node), self.load_of(node)
        impairment = self.impairments[node] if self.impairments else self.impairment
        link = [_written(rate, _RATES)] if rate is not None else []
        spread = f"{_SPREAD}{_written(impairment.jitter, _TIMES)}" if impairment.jitter else ""
        link += [_written(latency, _TIMES) + spread] if latency else []
        link += impairment.words()
        link += [f"{self.sites}places={_written(self.apart, _TIMES)}"] if self.sites > 1 else []
        busy = f"{_LOAD}{_written(load, _RATES)}" if load else ""
        return ("@" + ",".join(link) if link else "") + busy


def _uneven(text: str, servers: int, whole: str) -> Cluster:
    """Read ``COUNTxRANKS@RATE,LATENCY+load=RATE`` or ``RANKS@RATE``, once for each group of nodes."""
    words: list[str] = []
    for word in text.split(","):
        if "@" in word or not words:
            words.append(word.strip())
        else:  # the latency of the entry before, say
            words[-1] += f",{word}"
    found = [_group(word, whole) for word in words]
    if len({group.ranks_per_node for group in found}) > 1:
        raise ConfigError(
            f"the nodes of {whole!r} differ in their ranks, which is not possible: give all of them as many. "
            f"{_UNEVEN_EXAMPLES}"
        )
    if sum(group.nodes for group in found) > _MOST_PLANNED:
        raise ConfigError(f"the cluster {whole!r} cannot have so many nodes: write up to {_MOST_PLANNED:,}")
    nodes = [group for group in found for _ in range(group.nodes)]
    return Cluster(
        len(nodes),
        found[0].ranks_per_node,
        servers=servers,
        rates=tuple(node.rate for node in nodes if node.rate is not None),
        latencies=tuple(node.latency for node in nodes),
        loads=tuple(node.load for node in nodes),
        impairments=tuple(node.impairment for node in nodes),
    )


def _group(word: str, whole: str) -> Cluster:
    """The nodes of one entry, which are alike."""
    group = _GROUP.fullmatch(word)
    link = _link(group[3], whole) if group is not None else {}
    if "sites" in link:
        raise ConfigError(
            f"nodes of {whole!r} cannot be at places, as those are of clusters with equal links. {EXAMPLES}"
        )
    if group is None or link["rate"] is None:
        raise ConfigError(
            f"cannot read {word!r} as RANKS@RATE or COUNTxRANKS@RATE in the cluster {whole!r}. "
            f"{_UNEVEN_EXAMPLES}"
        )
    load = _load(group[4], whole) if group[4] else 0.0
    return Cluster(int(group[1] or 1), int(group[2]), load=load, **link)


def _load(word: str, whole: str) -> float:
    """Read the rate of a load."""
    value, unit = _quantity(word, whole)
    if unit not in _RATES or not value:
        raise ConfigError(
            f"cannot read {word!r} as the rate of a load, in the cluster {whole!r}: write for example "
            f"{_LOAD}10mbit, after the link. {_UNEVEN_EXAMPLES}"
        )
    return value


def _link(text: str, whole: str) -> dict[str, Any]:
    """Read ``RATE,LATENCY±JITTER,LOSS,MTU,PLACES``, each of which may be left out: fields of a cluster."""
    rate: float | None = None
    latency: float | None = None
    others: dict[str, Any] = {}
    placed: dict[str, Any] = {}
    for word in map(str.strip, text.split(",")):
        if (loss := _LOSS.fullmatch(word)) and "loss" not in others:
            others["loss"] = float(Decimal(loss[1]) / 100)
            continue
        if (mtu := _MTU.fullmatch(word)) and "mtu" not in others:
            others["mtu"] = int(mtu[1])
            continue
        if "%" in word or "loss" in word:
            raise ConfigError(
                f"cannot read {word!r} as a loss in the cluster {whole!r}: write it once, for example "
                f"1%loss. {EXAMPLES}"
            )
        if word == NAT and "nat" not in others:
            others["nat"] = True
            continue
        if (sites := _SITES.fullmatch(word)) and not placed:
            apart, unit = _quantity(sites[2], whole)
            if unit in _TIMES:
                placed = {"sites": int(sites[1]), "apart": apart}
                continue
        quantity, spread, jitter = word.partition(_SPREAD)
        value, unit = _quantity(quantity, whole)
        if unit in _TIMES and latency is None:
            latency = value
            others["jitter"], unit = _quantity(jitter, whole) if spread else (0.0, unit)
        elif unit in _RATES and rate is None and latency is None and not spread:
            rate, unit = value, "s"
        else:
            unit = ""
        if unit not in _TIMES:
            raise ConfigError(
                f"cannot read {text!r} in the cluster {whole!r}: after @ comes one rate, then one latency, "
                f"with its jitter, and a loss, an MTU, nat and places, each at most once. {EXAMPLES}"
            )
    return {"rate": rate, "latency": latency or 0.0, "impairment": Impairment(**others), **placed}


def _quantity(word: str, whole: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(word.strip())
    if match is None:
        raise ConfigError(
            f"cannot read {word!r} as a number with a unit in the cluster {whole!r}. {EXAMPLES}"
        )
    number, unit = match.groups()
    if unit not in _UNITS:
        raise ConfigError(
            f"unknown unit {unit!r} in the cluster {whole!r}. "
            f"Rates are in kbit, mbit or gbit (per second), latencies in us, ms or s. {EXAMPLES}"
        )
    return float(Decimal(number) * _UNITS[unit]), unit


def _written(value: float, units: dict[str, Decimal]) -> str:
    """A quantity in the largest unit that leaves at least 1, with all the digits that it needs."""
    exact = Decimal(repr(float(value)))
    unit = next((unit for unit, scale in units.items() if exact >= scale), list(units)[-1])
    return f"{(exact / units[unit]).normalize():f}{unit}"
