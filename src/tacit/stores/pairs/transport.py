"""The transport of ranks that average in pairs: server requests go to this rank's store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from tacit.contracts import Collective, PairTopology, Posted, PushPull, Transport
from tacit.errors import PeerLost, first_line
from tacit.stores.client.server_connection import PendingReply
from tacit.stores.client.transport import BesidePeers
from tacit.stores.pairs.store import ReplicaStore
from tacit.transports.message_layout import nbytes


class PairLink(Protocol):
    """A connection to one rank.

    Attributes:
        rank: that rank.
    """

    rank: int

    def ask(self, number: int, x: Tensor, reply: Callable[[Tensor | None], None]) -> None:
        """Have the rank average its bucket of this number with `x`, which stays as it is until then.

        Returns at once. `reply` is called once, in any thread: with how far the rank has moved, or with None
        where it is gone.
        """

    def close(self, settled: bool, why: str = "") -> None:
        """End the connection. `settled`: whether this rank is done, so that this is no error; else `why`."""


class Membership(Protocol):
    """Which ranks are there, as they agree on it."""

    def lose(self, rank: int, why: str) -> PeerLost:
        """Note that a rank is gone. Returns the error, which is raised unless lost ranks are allowed."""

    def meet(self, what: str) -> list[int]:
        """Wait until all ranks that are there have come here; returns them. `what`: where this one has come.

        Raises:
            PeerLost: one is gone and must not be; or this one was taken for gone.
            UnevenData: another one has come somewhere else.
        """

    def part(self) -> None:
        """Wait until all that came to the last meeting, in vain, know it; some seconds at most.

        Else those that do not yet would take the end of this rank's process for the reason.
        """

    def close(self) -> None:
        """Leave."""


Mean = Callable[[Sequence[int], Sequence[Tensor]], None]
"""Overwrites the tensors by their means over these ranks, which all call it."""


class PairTransport(BesidePeers):
    """Requests of the axis SERVER go to this rank's store; all others to `peers`.

    A push is added to the store. A rank that asks then averages it with its partners of the round, one after
    the other, and the answer is what the store holds when that is done.

    Args:
        peers: the transport of what all ranks do together.
        topology: who asks whom.
        members: who is there.
        mean: of all stores, where replicas are to be equal.
        seed: of the draws.
        leave: called as it is closed, to close `peers`.
    """

    def __init__(
        self,
        peers: Transport,
        topology: PairTopology,
        members: Membership,
        mean: Mean,
        seed: int = 0,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.peers, self.store = peers, ReplicaStore()
        self._topology, self._members, self._mean, self._seed = topology, members, mean, seed
        self._leave = leave
        self._links: dict[int, PairLink] = {}
        self._lost: set[int] = set()
        self._rounds: Counter[str] = Counter()
        self._numbers: dict[str, int] = {}
        self._outgoing: dict[str, Tensor] = {}
        self._messages: dict[str, Tensor] = {}
        self._pending: set[PendingReply] = set()
        self._meeting: dict[str, PendingReply] = {}
        self._settled = True
        self._failure: BaseException | None = None
        self._report: Callable[[BaseException], None] = lambda error: None
        self._steps: Callable[[], int] = lambda: 0
        self._lock = threading.Lock()

    # ---- how it begins --------------------------------------------------------------------------------

    def connect(self, link: PairLink) -> None:
        """Use this connection to a rank."""
        self._links[link.rank] = link

    def report_to(self, report: Callable[[BaseException], None], steps: Callable[[], int]) -> None:
        """Report a lost rank, if that is an error, even if nothing waits for it.

        `steps` returns the number of steps that this rank has taken.
        """
        self._report, self._steps = report, steps

    def enter(self, key: str, x: Tensor) -> Tensor:
        """Begin with these parameters of a bucket; returns them."""
        self.store.enter(key, x)
        self._numbers = {key: number for number, key in enumerate(self.store.keys)}
        self._outgoing[key], self._messages[key] = self.store.like(key), self.store.like(key)
        return x

    # ---- what others ask ------------------------------------------------------------------------------

    def like(self, number: int) -> Tensor:
        """An uninitialised tensor for the bucket of this number."""
        return self.store.like(self.store.keys[number])

    def answer(self, number: int, theirs: Tensor, out: Tensor, start: int = 0) -> Tensor:
        """Average the bucket of this number with another rank's; see `ReplicaStore.answer`."""
        return self.store.answer(self.store.keys[number], theirs, out, start)

    def lose(self, rank: int, why: str) -> None:
        """A rank is gone: it is left out, or an error from now on."""
        with self._lock:
            if rank in self._lost or self._failure is not None:
                return
            self._lost.add(rank)
        error = self._members.lose(rank, why)
        if not self._topology.allow_lost:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Answer all requests under way, and all later ones, with this error."""
        self._failure = self._failure or error
        with self._lock:
            pending, self._pending = [*self._pending], set()
        for each in pending:
            each.end(error=self._failure)
        self._report(self._failure)

    # ---- what this rank asks --------------------------------------------------------------------------

    def post(self, request: Collective, stage: int, key: str) -> Posted:
        """Start it; see `contracts.Transport`."""
        if not isinstance(request, PushPull):
            return self.peers.post(request, stage, key)
        posted = PendingReply(None, sum(map(nbytes, request.payloads)))
        with self._lock:
            self._pending.add(posted)
        if self._failure is not None:
            posted.end(error=self._failure)
        else:
            self._begin(request, key, posted)
        return posted

    def _begin(self, request: PushPull, key: str, posted: PendingReply) -> None:
        meets, turns = request.do == "meet", self._topology.turns(self.place().peers)
        first = self._rounds[key] * turns
        if request.payloads:
            self._settled = False
            self._rounds[key] += 1
            self.store.push(key, request.payloads[0][0])
        if meets:
            end = f" after {self._steps()} steps" if self._topology.global_every else ""
            what = f"its round {self._rounds[key]}" if request.payloads else f"session.sync() or its end{end}"
            self._come(key, posted, what)
        else:
            self._average(key, posted, range(first, first + turns))

    def _average(self, key: str, posted: PendingReply, turns: Sequence[int]) -> None:
        """Average the bucket with the partner of each turn, if there is one."""
        here, lost = self.place(), frozenset(self._lost)
        for done, turn in enumerate(turns, 1):
            partner = self._topology.partner(here.rank, here.peers, turn, self._seed, lost)
            if partner is not None:
                x = self.store.read(key, self._outgoing[key])
                moved = partial(self._moved, key, posted, turns[done:])
                self._links[partner].ask(self._numbers[key], x, moved)
                return
        self._end(key, posted)

    def _moved(self, key: str, posted: PendingReply, turns: Sequence[int], by: Tensor | None) -> None:
        """The partner has moved by so much, or is gone; `turns`: those that are left."""
        if by is not None:
            self.store.take(key, by)
        self._average(key, posted, turns)

    def _end(self, key: str, posted: PendingReply) -> None:
        with self._lock:
            self._pending.discard(posted)
        if self._failure is not None:
            posted.end(error=self._failure)
        else:
            posted.end(((self.store.read(key, self._messages[key]),),))

    # ---- where all are to be equal --------------------------------------------------------------------

    def _come(self, key: str, posted: PendingReply, what: str) -> None:
        """The last bucket for which this rank comes begins the meeting."""
        self._meeting[key] = posted
        if len(self._meeting) == len(self._numbers):
            threading.Thread(target=self._meet, args=(what,), name="tacit-meet", daemon=True).start()

    def _meet(self, what: str) -> None:
        meeting, self._meeting = self._meeting, {}
        try:
            self._make_equal(what)
        except BaseException as error:
            self._failure = self._failure or error  # which stands, whoever is gone from here on
            self._members.part()
            self.fail(error)
            return
        self._settled = True
        for key, posted in meeting.items():
            self._end(key, posted)

    def _make_equal(self, what: str) -> None:
        here = self._members.meet(what)
        for rank in set(range(self.place().peers)) - set(here) - self._lost:
            self._lost.add(rank)
            if rank in self._links:
                self._links[rank].close(settled=False)
        # From here on nobody is answered. Who asks again has all means, so that all ranks are here by then.
        with self.store.held() as buckets:
            try:
                self._mean(here, buckets)
            except RuntimeError as error:
                gone = sorted(self._lost & set(here))
                who = f"of these {gone} are" if gone else "one of them is"
                raise PeerLost(
                    f"the ranks {here} were to be equal, and {who} gone: {first_line(error)}"
                ) from error

    # ---- how it ends ----------------------------------------------------------------------------------

    def abort(self, error: BaseException | None = None) -> None:
        """End all pending requests with an error, and the links, so that others know."""
        self._settled = False
        self._failure = self._failure or error or RuntimeError("the session has failed")
        self.fail(self._failure)
        # The loss of a rank that others have reported is not reported again.
        why = "" if isinstance(self._failure, PeerLost) or error is None else str(self._failure)
        for link in [*self._links.values()]:
            link.close(settled=False, why=why)

    def close(self) -> None:
        """Leave, if replicas are equal; otherwise other ranks count this one as lost."""
        for link in [*self._links.values()]:
            link.close(self._settled)
        self._members.close()
        self._leave()
