"""Rates and latencies of links, measured by messages between ranks: one stream, several, both directions."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from time import perf_counter, process_time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tacit.errors import ProbeError
from tacit.links import MATRICES, Links, Matrix
from tacit.transports.message_layout import WAYS
from tacit.transports.network_interfaces import segments
from tacit.transports.process_groups import connections, control, own_groups

FLOWS = 4
"""Streams of the measurement with several."""
_PINGS, _FEW_PINGS = 25, 4
_FIRST_BYTES, _MOST_BYTES = 16 << 10, 64 << 20
_AHEAD = 4
"""A transfer's bytes over those that go ahead of it, which are more than passes at once."""
_ENOUGH = 0.3
"""The share of the wanted time from which a transfer shows the rate well enough to choose the next size."""
_COUNTED_BYTES, _COUNTED = 1 << 20, 40
"""The sizes of messages that measure processor time, and their number; a tenth as many of the large one."""
_BUDGET = 0.25
"""The seconds after which no more of a size are measured; at least two are."""
_TRIPS = 6
"""The round trips that a transfer takes at least: TCP sends little in the first ones."""
_SMALL, _FEW_A_RANK = 4096, 16
"""Numbers of small messages: of all ranks together, and of each. Of a single number most hops have nothing to
send, so that receivers are ready early, and a hop takes no round trip."""
_LONG_ENOUGH = 0.02
_TAG_PING, _TAG_SIZE, _TAG_READY, _TAG_BEGUN, _TAG_AHEAD, _TAG_DATA, _TAG_DONE = range(7)


def measure(
    group: dist.ProcessGroup,
    nodes: Sequence[Sequence[int]],
    *,
    seconds: float = 0.1,
    timeout: timedelta = timedelta(seconds=20),
) -> Links:
    """Measure all links between nodes, and within each. A collective call.

    The first rank of each node sends and receives for it. Disjoint pairs of nodes measure at the same time,
    as in training all links are used at once, too.

    Args:
        group: all ranks.
        nodes: the ranks of each node, counted within the group.
        seconds: the approximate seconds of a measured transfer.
        timeout: after which a peer that does not answer is an error.

    Returns:
        The links, equal on all ranks.

    Raises:
        ProbeError: a link carried nothing, or no large messages; names its nodes.
    """
    flows = own_groups(group, range(group.size()), timeout, "gloo", (0, "probe"), FLOWS)
    found = torch.zeros(len(MATRICES), len(nodes), len(nodes), dtype=torch.float64)
    before = segments()
    trouble = _in_turns(flows, group, nodes, seconds, lambda link, i, j: _fill(found, i, j, link))
    return _shared(found, trouble, segments().resent_since(before), control(group), nodes)


def latencies(group: dist.ProcessGroup, nodes: Sequence[Sequence[int]]) -> Matrix:
    """Seconds of a small message from each node to each other, one way, by few messages. A collective call.

    Raises:
        ProbeError: nothing comes through a link; on the ranks at its ends.
    """
    host, found = control(group), torch.zeros(len(nodes), len(nodes), dtype=torch.float64)

    def fill(link: _Link, i: int, j: int) -> None:
        seconds = link.latency(_FEW_PINGS)
        if link.lower and i != j:
            found[i, j] = found[j, i] = seconds

    if trouble := _in_turns([host], group, nodes, 0.0, fill):
        raise ProbeError(trouble)
    dist.all_reduce(found, group=host)
    return _matrix(found)


def _in_turns(
    flows: Sequence[dist.ProcessGroup],
    group: dist.ProcessGroup,
    nodes: Sequence[Sequence[int]],
    seconds: float,
    fill: Callable[[_Link, int, int], None],
) -> str:
    """Have both ends of each link measure it, disjoint pairs at once. Returns what did not work."""
    me, host, trouble = dist.get_rank(group), control(group), []
    mine = next(number for number, node in enumerate(nodes) if me in node)
    for turn in (*_turns(len(nodes)), [(node, node) for node in range(len(nodes))]):
        for i, j in turn:
            ends = (nodes[i][0], nodes[j][0]) if i != j else nodes[i][:2]
            if mine in (i, j) and me in ends and len(ends) == 2:
                other = ends[1] if me == ends[0] else ends[0]
                try:
                    fill(_Link(flows, other, seconds, me == ends[0], (i, j)), i, j)
                except ProbeError as error:
                    trouble.append(str(error))
        dist.barrier(host)  # a rank that waited for a link that is down comes late
    return "; ".join(trouble)


def _turns(nodes: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of nodes once, in turns of disjoint pairs, as in a round-robin tournament."""
    places = [*range(nodes), *([-1] if nodes % 2 else [])]
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
        places = [places[0], places[-1], *places[1:-1]]


def _fill(found: Tensor, i: int, j: int, link: _Link) -> None:
    """Fill in both directions of a link, at its lower end only: the sum over ranks is the matrix."""
    latency = link.latency()
    there, back = link.rate(1, to_upper=True), link.rate(1, to_upper=False)
    many_there, many_back = link.rate(FLOWS, to_upper=True), link.rate(FLOWS, to_upper=False)
    both = link.both()
    if link.lower:
        found[:, i, j] = torch.tensor([latency, there, many_there, both], dtype=torch.float64)
        if i != j:
            found[:, j, i] = torch.tensor([latency, back, many_back, both], dtype=torch.float64)


@dataclass
class _Link:
    """This rank's end of a measured link.

    Attributes:
        flows: process groups, each with separate connections.
        peer: the rank at the other end, within the group.
        seconds: the seconds that a transfer should take.
        lower: whether this end leads, and has the results.
        nodes: for errors.
        trip: the seconds of a round trip, once they are measured.
    """

    flows: Sequence[dist.ProcessGroup]
    peer: int
    seconds: float
    lower: bool
    nodes: tuple[int, int]
    trip: float = 0.0

    def latency(self, pings: int = _PINGS) -> float:
        """Half of a round trip, in seconds: the shortest of many, as other load only adds to it."""
        try:
            self.trip = min(self._ping(0) for _ in range(pings))
        except RuntimeError as error:
            raise self._trouble(error) from None
        return self.trip / 2

    def _ping(self, flow: int) -> float:
        """The seconds of a round trip."""
        message, start = torch.zeros(1, dtype=torch.float32), perf_counter()
        for call in (self._send, self._receive) if self.lower else (self._receive, self._send):
            call(message, _TAG_PING, flow).wait()
        return perf_counter() - start

    def rate(self, flows: int, *, to_upper: bool) -> float:
        """The bit/s of several streams in one direction; at the lower end."""
        return self._grown(flows, sends=self.lower == to_upper, receives=self.lower != to_upper)

    def both(self) -> float:
        """The bit/s in each direction, of one stream each."""
        return self._grown(1, sends=True, receives=True)

    def _grown(self, flows: int, *, sends: bool, receives: bool) -> float:
        """Increase the size until a transfer takes long enough, then repeat it. Returns the better bit/s."""
        size = last = _FIRST_BYTES
        while size:
            took = self._timed(size, flows, sends, receives)
            last, size = size, self._agreed(_next(size, took, max(self.seconds, _TRIPS * self.trip)))
        return 8 * last * flows / min(took, self._timed(last, flows, sends, receives))

    def _timed(self, size: int, flows: int, sends: bool, receives: bool) -> float:
        """The seconds of a transfer, at the lower end, but for those of the way there and back.

        A link that was idle may let a burst pass at once. So some bytes go ahead, and the receiver counts
        from their end on. It may be held up then, so a transfer takes no less than its share of the whole.
        """
        token = torch.zeros(1, dtype=torch.float32)
        ahead = max(size // _AHEAD, _FIRST_BYTES)
        parts = ((ahead, _TAG_AHEAD), (size, _TAG_DATA))
        into, out = (
            [
                (torch.empty(length, dtype=torch.uint8), tag, flow)
                for length, tag in parts
                for flow in range(flows)
            ]
            for _ in range(2)
        )
        # Who is to receive is ready before the clock starts: Gloo sends nothing before that, and has half of
        # the rate if the send comes first.
        works = [self._receive(*each) for each in into if receives]
        done = torch.zeros(1, dtype=torch.float32)
        if self.lower:
            ended = self._receive(done, _TAG_DONE)
            self._wait(self._receive(token.clone(), _TAG_READY))
        else:
            begun = self._receive(token.clone(), _TAG_BEGUN)
            self._wait(self._send(token, _TAG_READY))
            self._wait(begun)
        start = perf_counter()
        sent = [self._send(token, _TAG_BEGUN)] if self.lower else []
        sent += [self._send(*each) for each in out if sends]
        for work in works[:flows]:
            self._wait(work)
        counted = perf_counter()
        for work in works[flows:]:
            self._wait(work)
        behind = perf_counter() - counted if receives else 0.0
        for work in sent:
            self._wait(work)
        self._wait(ended if self.lower else self._send(torch.tensor([behind]), _TAG_DONE))
        took = perf_counter() - start
        whole = max(took - self.trip, took / 2)
        return max(behind, float(done), whole * size / (size + ahead))

    def _agreed(self, size: int) -> int:
        """The next size, as the lower end chooses; 0: there is none."""
        message = torch.tensor([size])
        self._wait(self._send(message, _TAG_SIZE) if self.lower else self._receive(message, _TAG_SIZE))
        return int(message)

    def _send(self, data: Tensor, tag: int, flow: int = 0) -> dist.Work:
        group = self.flows[flow]
        work = dist.isend(data, dist.get_global_rank(group, self.peer), group, tag)
        assert work is not None
        return work

    def _receive(self, data: Tensor, tag: int, flow: int = 0) -> dist.Work:
        group = self.flows[flow]
        work = dist.irecv(data, dist.get_global_rank(group, self.peer), group, tag)
        assert work is not None
        return work

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._trouble(error) from None

    def _trouble(self, error: RuntimeError) -> ProbeError:
        """What is wrong with the link: whether only large messages do not pass, both ends try together."""
        low, high = self.nodes
        where = f"within node {low}" if low == high else f"between node {low} and node {high}"
        if self.trip:
            with suppress(RuntimeError):
                self._ping(FLOWS - 1)  # where nothing has failed yet, as Gloo closes what has
                return ProbeError(
                    f"small messages pass {where}, and large ones do not: full packets are lost on the way, "
                    "as in a tunnel whose MTU is smaller than that of the interfaces. Set a smaller one on "
                    "all machines: ip link set dev eth0 mtu 1280, with the interface's name"
                )
        reason = str(error).splitlines()[0]
        return ProbeError(
            f"nothing comes through {where} ({reason}): is that link up, and are all ports between these "
            "machines open?"
        )


def _next(size: int, took: float, wanted: float) -> int:
    """The size of the next transfer; 0 if this one was long enough, or has the largest size."""
    if took >= 0.8 * wanted or size >= _MOST_BYTES:
        return 0
    grown = size * wanted / took if took >= _ENOUGH * wanted else 4 * size
    return min(_MOST_BYTES, math.ceil(grown))


def _shared(
    found: Tensor, trouble: str, resent: float, group: dist.ProcessGroup, nodes: Sequence[Sequence[int]]
) -> Links:
    """The results of all ranks, on every rank.

    Raises:
        ProbeError: a rank could not measure a link.
    """
    told = [("", "", 0.0)] * group.size()
    try:
        dist.all_gather_object(told, (socket.gethostname(), trouble, resent), group)
        dist.all_reduce(found, group=group)
    except RuntimeError as error:
        raise ProbeError(trouble or f"a rank has left while links were measured ({error})") from None
    first = next((said for _, said, _ in told if said), "")
    if first:
        raise ProbeError(first)
    return Links(
        hosts=tuple(told[node[0]][0] for node in nodes),
        ranks=tuple(tuple(node) for node in nodes),
        **dict(zip(MATRICES, map(_matrix, found), strict=True)),
        flows=FLOWS,
        backend="gloo",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        resent=tuple(told[node[0]][2] for node in nodes),
    )


def _matrix(values: Tensor) -> Matrix:
    return tuple(tuple(value or None for value in row) for row in values.tolist())


@dataclass(frozen=True)
class RingCost:
    """The cost of Gloo's ring collectives, with all ranks at once.

    Attributes:
        per_byte: seconds of processor time for each byte that a rank sends and receives.
        per_hop: seconds of processor time for each message of a chain.
        rate: bytes a second that a rank sends; infinite for one rank.
        trip: seconds of wall-clock time for each message of a chain: there and back, as Gloo sends.
        rate_of_sums: the same rate where a message is cut for several connections (`TACIT_CONNECTIONS`).
    """

    per_byte: float = 0.0
    per_hop: float = 0.0
    rate: float = math.inf
    trip: float = 0.0
    rate_of_sums: float = math.inf

    @property
    def latency(self) -> float:
        """Seconds of a message one way, as of `Links.latency`."""
        return self.trip / WAYS


def ring_cost(group: dist.ProcessGroup, timeout: timedelta = timedelta(seconds=60)) -> RingCost:
    """Measure all-reduces of a few numbers, of 16 KiB, and of a megabyte or more. A collective call.

    The result is equal on all ranks. The processor time of a message is that of 16 KiB, as Gloo takes far
    less for a single number than for other small messages. Where links are slow, few of each are enough.
    """
    peers = group.size()
    if peers == 1:
        return RingCost()
    many = connections()
    own = own_groups(group, range(peers), timeout, "gloo", (0, "probe"), 1, many)[0]
    hops = 2 * (peers - 1)
    least = _averaged(torch.zeros(_FEW_A_RANK * peers, dtype=torch.float32), own, _COUNTED)
    small = _averaged(torch.zeros(_SMALL, dtype=torch.float32), own, _COUNTED)
    size = _COUNTED_BYTES
    large = _averaged(torch.zeros(size // 4, dtype=torch.float32), own, _COUNTED // 10)
    if (
        _longest(large.clock, own) < _LONG_ENOUGH
    ):  # a shaped link lets a burst pass, and a fast link is done at once
        size *= 8
        large = _averaged(torch.zeros(size // 4, dtype=torch.float32), own, _COUNTED // 10)
    whole = torch.zeros(size // 4, dtype=torch.float32)
    cut = _averaged(whole, own, _COUNTED // 10, many) if many > 1 else large
    sent = hops / peers * size

    def net(clock: float) -> float:
        """Seconds of the bytes: in a message's two parts, as each one's way there and back is hidden."""
        return max(min(clock, 2 * (clock - small.clock)), clock / 10) / sent

    found = torch.tensor(
        [
            max(0.0, large.processor - small.processor) / sent,
            small.processor / hops,
            net(large.clock),
            least.clock / hops,
            net(cut.clock),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(found, group=own)
    per_byte, per_hop, seconds, trip, of_sums = (found / peers).tolist()
    return RingCost(per_byte, per_hop, 1 / seconds, trip, 1 / of_sums)


class _Spent(NamedTuple):
    """Seconds of one collective."""

    processor: float
    clock: float


def _averaged(data: Tensor, group: dist.ProcessGroup, most: int, parts: int = 1) -> _Spent:
    """The mean cost of an all-reduce in so many parts, over `most` of them or what fits into the budget."""

    def once() -> None:
        works = [dist.all_reduce(part, group=group, async_op=True) for part in data.tensor_split(parts)]
        for work in works:
            assert work is not None
            work.wait()

    dist.barrier(group)
    clock = perf_counter()
    once()
    count = min(most, max(2, int(_BUDGET / _longest(perf_counter() - clock, group))))
    processor, clock = process_time(), perf_counter()
    for _ in range(count):
        once()
    return _Spent((process_time() - processor) / count, (perf_counter() - clock) / count)


def _longest(seconds: float, group: dist.ProcessGroup) -> float:
    """The longest of the ranks' times; equal on all ranks."""
    found = torch.tensor([seconds], dtype=torch.float32)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found)
