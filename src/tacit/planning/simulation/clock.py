"""A simulated clock: the time that collectives and computing take on a cluster.

One rank is simulated for all, as ranks that exchange wait for each other. Its threads share the cores of its
machine with those of the other ranks there, and concurrent messages share its node's link.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from tacit.contracts import NET, NODE
from tacit.planning.profile import GpuLinks
from tacit.transports.message_layout import AT_ONCE, IN_ROUNDS, WAYS

_DONE = 1e-12
_WINDOW, _LEAST_TIMEOUT, _MOST_HALVED = 14_480, 0.2, 64
"""The bytes that a new connection of TCP sends at once; seconds of its time-out, less a round trip."""


@dataclass(frozen=True)
class Network:
    """Links and processors of a cluster.

    Attributes:
        nodes: the number of nodes.
        ranks: the number of ranks of each node.
        rate: the bytes a second that the slowest node sends to its neighbour in a ring.
        latency: seconds of a small message between nodes, one way.
        near_rate: the bytes a second between two ranks of a node; infinite if only processors limit it.
        near_latency: seconds of a small message inside a node.
        cores: the number of cores of a machine.
        sharing: the number of ranks that share them.
        per_byte: seconds of processor time for a byte that a rank sends and receives.
        per_hop: seconds of processor time for each message of a collective.
        rates: the bytes a second of each node's link, if they differ.
        connections: how many times as much a link carries by several connections, which sums alone are cut
            for.
        gpu: the same for NCCL's collectives between GPUs; those above are Gloo's.
    """

    nodes: int
    ranks: int
    rate: float
    latency: float
    cores: float
    sharing: int
    per_byte: float
    per_hop: float
    near_rate: float = math.inf
    near_latency: float = 5e-5
    rates: tuple[float, ...] = ()
    connections: float = 1.0
    gpu: GpuLinks = GpuLinks()

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks

    def members(self, axis: str) -> int:
        """The number of ranks in a collective on this axis."""
        return {NODE: self.ranks, NET: self.nodes}.get(axis, self.world)

    def transfer(
        self,
        kind: str,
        axis: str,
        sent: int,
        crossing: int,
        by_node: Sequence[int] = (),
        by_nccl: bool = False,
    ) -> Transfer:
        """A collective of a kind (the request's class), for one rank.

        Args:
            sent: bytes that the rank sends.
            crossing: bytes that leave its node, from all ranks there.
            by_node: the crossing bytes of each node, if they differ; the collective ends with the slowest.
            by_nccl: whether NCCL carries it, from GPU to GPU.
        """
        peers = self.members(axis)
        crowded = self.nodes > 1 and self.ranks > 1 and peers == self.world
        far = crossing > 0
        if far and by_node and self.rates:
            longest = max(nbytes / rate for nbytes, rate in zip(by_node, self.rates, strict=True))
            crossing = round(longest * self.rate)
        if by_nccl:
            return self._of_nccl(kind, self.nodes if far and crowded else peers, sent, crossing)
        hops = _hops(kind, peers, crowded)
        latency = self.latency if far else self.near_latency
        nbytes, rate = float(crossing if far else sent), self.rate if far else self.near_rate
        delay = WAYS * hops * latency
        if kind == "AllReduce":
            rate *= self.connections if far else 1.0
            # In two parts: the way of one is hidden while the other travels.
            delay = max(0.0, delay - nbytes / rate / 2)
        return Transfer(
            link=NET if far else NODE,
            nbytes=nbytes,
            rate=rate,
            delay=delay,
            cpu=self.per_byte * sent + self.per_hop * max(hops, _rounds(kind, peers, sent)),
        )

    def resumed(self, kind: str, axis: str, transfer: Transfer, sent: int, silence: float) -> Transfer:
        """The transfer after so many seconds without a message: TCP halves its window for each time-out.

        Then twice as many bytes go in each round trip, until all have gone, or the link is full.
        """
        halved = math.ceil(min(silence / (_LEAST_TIMEOUT + 2 * self.latency), _MOST_HALVED)) - 1
        if transfer.link != NET or halved < 1 or not self.latency:
            return transfer
        peers = max(2, self.members(axis))
        in_turn = {"AllReduce": 2 * (peers - 1), "AllGatherInto": 1, "Broadcast": 1, "Permute": 1}
        left, trip = sent / in_turn.get(kind, peers - 1), 2 * self.latency
        full = transfer.rate * trip / (1 if kind in in_turn else peers - 1)
        window, lost = max(_WINDOW, min(left, full) / 2**halved), 0.0
        while window < min(left, full):
            lost += trip * (1 - window / full)
            left -= window
            window *= 2
        return replace(transfer, delay=transfer.delay + lost)

    def _of_nccl(self, kind: str, peers: int, sent: int, crossing: int) -> Transfer:
        """A collective of NCCL's among so many places of a chain; no processor's time is counted."""
        links, far = self.gpu, crossing > 0
        nbytes, rate = (crossing, links.rate) if far else (sent, links.near_rate)
        delay = nccl_hops(kind, peers) * (links.latency if far else links.near_latency)
        return Transfer(NET if far else NODE, float(nbytes), rate or math.inf, delay, 0.0)


def nccl_hops(kind: str, peers: int) -> int:
    """The length of the longest chain of messages in a collective of NCCL: trees for sums, else rings."""
    if peers < 2:
        return 0
    chains = {
        "AllReduce": 2 * math.ceil(math.log2(peers)),
        "AllGather": peers - 1,
        "AllGatherInto": peers - 1,
        "ReduceScatter": peers - 1,
        "Broadcast": peers - 1,
    }
    return chains.get(kind, 1)


def _rounds(kind: str, peers: int, sent: int) -> int:
    """How many messages a rank sends one by one, in rounds that wait for no answer; 0: none."""
    most = {"AllGather": AT_ONCE, "AllToAll": IN_ROUNDS, "ReduceScatter": IN_ROUNDS}.get(kind, math.inf)
    return peers - 1 if sent > (peers - 1) * most else 0


def _hops(kind: str, peers: int, crowded: bool) -> int:
    """The length of the longest chain of messages in a collective of Gloo."""
    if peers < 2:
        return 0
    tree = math.ceil(math.log2(peers))
    return {
        "AllReduce": 2 * (peers - 1),
        "AllGather": peers - 1 if crowded else 1,
        "AllGatherInto": tree,
        "Broadcast": tree,
    }.get(kind, 1)


@dataclass(frozen=True)
class Transfer:
    """A collective.

    Attributes:
        link: the link that it uses: between nodes (NET), or inside one (NODE).
        nbytes: the bytes on that link.
        rate: bytes a second, if nothing else is on the link.
        delay: seconds before the first byte has passed all ranks.
        cpu: seconds of the rank's processor time in all.
    """

    link: str
    nbytes: float
    rate: float
    delay: float
    cpu: float


@dataclass(eq=False)
class Activity:
    """A simulated activity: work of a thread, a transfer, or waiting.

    Attributes:
        kind: "work", or the link that it uses.
        left: the seconds of processor time, or bytes, that remain.
        demand: the cores that it uses at full speed.
        done: whether it is over.
    """

    kind: str
    left: float
    demand: float = 1.0
    transfer: Transfer | None = None
    speed: float = 0.0
    done: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` when this is over; at once if it is."""
        if self.done:
            call()
        else:
            self.waiting.append(call)

    def pass_time(self, seconds: float) -> bool:
        """Advance by some seconds. Returns whether it is over."""
        self.left -= seconds * self.speed
        return self.left <= _DONE * max(1.0, self.speed)

    def share_link(self, sharing: int) -> float:
        """The cores that it uses if `sharing` activities share its link, and enough cores are free."""
        self.speed = 1.0
        if self.transfer is not None:
            self.speed, self.demand = _full_speed(self.transfer, sharing)
        return self.demand

    def take_cores(self, cores: float) -> None:
        """Assign it a number of cores."""
        if self.demand > 0:
            self.speed *= cores / self.demand

    def end(self) -> None:
        """End it, and resume all that waits for it."""
        self.done = True
        for call in self.waiting:
            call()


class Clock:
    """Simulates one rank: all activities advance at the speed that cores and links allow.

    Args:
        cores: the cores that this rank has on average.

    Attributes:
        now: seconds since the beginning.
    """

    def __init__(self, cores: float) -> None:
        self.now = 0.0
        self._cores = cores
        self._active: list[Activity] = []
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._stale = True

    def work(self, seconds: float, threads: int = 1) -> Activity:
        """Begin work of a thread, or of several threads that divide it."""
        activity = Activity("work", seconds / threads, float(threads))
        self._begin(activity)
        return activity

    def send(self, transfer: Transfer) -> Activity:
        """Begin a collective, which uses the link once its delay is over."""
        activity = Activity(transfer.link, transfer.nbytes, transfer=transfer)
        if transfer.nbytes <= 0 or (math.isinf(transfer.rate) and transfer.cpu <= 0):
            activity = Activity(transfer.link, 0.0, transfer=transfer)
        self.after(transfer.delay, partial(self._begin, activity))
        return activity

    def rest(self, seconds: float) -> Activity:
        """Begin to wait, without using a core."""
        activity = Activity("rest", 0.0)
        self.after(seconds, activity.end)
        return activity

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call `call` in some seconds."""
        heapq.heappush(self._timers, (self.now + seconds, next(self._numbers), call))

    def run(self, process: Generator[Activity, None, None]) -> None:
        """Run a process to its end; it waits for each activity that it yields."""
        over = self.spawn(process)
        while not over.done:
            self._advance()

    def spawn(self, process: Generator[Activity, None, None]) -> Activity:
        """Start a process. The returned activity ends with it."""
        over = Activity("process", 0.0)

        def resume() -> None:
            try:
                next(process).then(resume)
            except StopIteration:
                over.end()

        resume()
        return over

    def _begin(self, activity: Activity) -> None:
        if activity.left <= _DONE:
            activity.end()
        else:
            self._active.append(activity)
            self._stale = True

    def _advance(self) -> None:
        """Advance to the next time at which an activity ends or begins."""
        if self._stale:
            self._share()
        ends = min((each.left / each.speed for each in self._active if each.speed), default=math.inf)
        starts = self._timers[0][0] - self.now if self._timers else math.inf
        elapsed = min(ends, starts)
        assert math.isfinite(elapsed), "everything waits for something else"
        self.now += elapsed
        over = [each for each in self._active if each.pass_time(elapsed)]
        if over:
            self._active = [each for each in self._active if each not in over]
            self._stale = True
        for each in over:
            each.end()
        while self._timers and self._timers[0][0] <= self.now + _DONE:
            heapq.heappop(self._timers)[2]()

    def _share(self) -> None:
        """Divide links equally, and cores equally up to each activity's demand."""
        on_link = Counter(each.kind for each in self._active if each.transfer is not None)
        wanted = sorted(
            ((each.share_link(on_link[each.kind]), each) for each in self._active), key=lambda pair: pair[0]
        )
        free = self._cores
        for taken, (demand, each) in enumerate(wanted):
            given = min(demand, free / (len(wanted) - taken))
            free -= given
            each.take_cores(given)
        self._stale = False


def _full_speed(transfer: Transfer, sharing: int) -> tuple[float, float]:
    """The bytes a second on a shared link, and the cores that this uses: one at most."""
    per_byte = transfer.cpu / transfer.nbytes
    rate = transfer.rate / sharing
    if per_byte and rate * per_byte > 1.0:
        rate = 1.0 / per_byte
    return rate, rate * per_byte
