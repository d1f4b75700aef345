"""Which ranks of those that average in pairs are there: they agree on it by the launcher's store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from tacit.contracts import PairTopology
from tacit.errors import PeerLost, UnevenData, of_ranks
from tacit.failure.barrier import silence_for
from tacit.failure.bounded_store import BoundedStore, KeyValueStore, store_gone, store_host
from tacit.stores.pairs import Membership, PairTransport, join
from tacit.torch_compat import PrefixStore, default_store
from tacit.transports.process_groups import ranks_of
from tacit.transports.torch_distributed import TorchTransport

POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""How long those that have met in vain wait for each other."""
_log = logging.getLogger("tacit")


class PairMembers(Membership):
    """Membership on one rank. A rank that finds another gone writes it to the store; all check each second.

    While some ranks have arrived at a barrier, a thread of each writes there each second that it lives. So a
    rank that has not arrived is waited for as long as it lives, and counts as gone after some silence.

    Args:
        store: used by these ranks alone, and for this session.
        rank: this one of so many `peers`, from 0.
        allow_lost: whether the others go on where one is gone.
        timeout: after which a store that does not answer is an error.
        known_as: the rank's number in errors; by default the same.
        host: the rank whose process serves the store, if one does.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        peers: int,
        allow_lost: bool,
        timeout: float = 60.0,
        known_as: Sequence[int] = (),
        host: int | None = None,
    ) -> None:
        self._store = BoundedStore(store, timeout)
        self._silence = silence_for(timeout)
        self._rank, self._peers, self._allow_lost = rank, peers, allow_lost
        self._known_as, self._host = known_as or range(peers), host
        self._lost: set[int] = set()
        self._meetings = 0
        self._come: list[int] = []
        self._met = False
        self._heard: dict[int, tuple[str, float]] = {}
        self._report: Callable[[int, str], None] = lambda rank, why: None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="tacit-pair-members", daemon=True)
        self._thread.start()

    def report_to(self, report: Callable[[int, str], None]) -> None:
        """Call `report` with each rank that others have reported as gone, and the reason; in a thread."""
        self._report = report

    # ---- who is gone ----------------------------------------------------------------------------------

    def lose(self, rank: int, why: str) -> PeerLost:
        first = f"{rank} {why}"
        with self._lock:
            new = rank not in self._lost
            self._lost.add(rank)
        with contextlib.suppress(dist.DistError):  # then the others find out by themselves
            self._store.compare_set(f"lost/{rank}", "", why)
            first = self._store.compare_set("first lost", "", first).decode()
        if new and self._allow_lost:
            _log.warning(
                "rank %d goes on without rank %d, which is gone: %s. Its last steps may be lost, and its "
                "data are no longer trained on",
                *(self._known_as[self._rank], self._known_as[rank], why),
            )
        number, _, why = first.partition(" ")
        gone = f"rank {self._known_as[int(number)]} is gone: {why}"
        return PeerLost(gone if self._allow_lost else f"{gone}. To go on without it, write allow_lost=true")

    def _watch(self) -> None:
        beats = 0
        while not self._closing.wait(POLL_SECONDS):
            try:
                if self._store.check(["first lost"]):
                    self._tell_lost()
                if self._store.check(["meeting"]):
                    beats += 1
                    self._store.set(f"alive/{self._rank}", str(beats))
            except dist.DistError:
                return  # the next call to the store reports it

    def _tell_lost(self) -> None:
        for rank in range(self._peers):
            if rank not in (*self._lost, self._rank) and self._store.check([f"lost/{rank}"]):
                self._report(rank, self._store.get(f"lost/{rank}").decode())

    # ---- where all come together ----------------------------------------------------------------------

    def meet(self, what: str) -> list[int]:
        self._meetings += 1
        meeting, delay = str(self._meetings), 0.002
        try:
            self._store.set(f"{meeting}/here/{self._rank}", what)
            self._store.set("meeting", "")
            since = time.monotonic()
            while True:
                here = [rank for rank in range(self._peers) if self._is_here(meeting, rank)]
                if len(here) + len(self._missing(here, since)) == self._peers:
                    break
                time.sleep(delay)
                delay = min(2 * delay, 0.05)
            given = self._store.compare_set(f"{meeting}/members", "", " ".join(map(str, here)))
            members = [*map(int, given.split())]
            come = {rank: self._store.get(f"{meeting}/here/{rank}").decode() for rank in members}
        except dist.DistError as error:
            raise store_gone(error, self._host) from error
        self._come = members if self._rank in members else []
        self._check(members)
        self._check_same(come, what)
        self._met = True
        return members

    def part(self) -> None:
        with contextlib.suppress(dist.DistError):
            self._store.set(f"{self._meetings}/over/{self._rank}", "")
            deadline = time.monotonic() + GRACE_SECONDS
            for rank in self._come:
                while not (rank in self._lost or self._store.check([f"{self._meetings}/over/{rank}"])):
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.02)

    def _check_same(self, come: Mapping[int, str], what: str) -> None:
        """Refuse to average all at the end of some, and in a round of others."""
        for rank, where in come.items():
            if where != what:
                here, there = self._known_as[self._rank], self._known_as[rank]
                raise UnevenData(
                    f"rank {here} has come to {what}, and rank {there} to {where}, where all ranks are "
                    "averaged: give all of them equally many batches, or attach 'adpsgd', whose ranks may "
                    "take other numbers of steps"
                )

    def _is_here(self, meeting: str, rank: int) -> bool:
        return self._store.check([f"{meeting}/here/{rank}"])

    def _missing(self, here: list[int], since: float) -> list[int]:
        """Those that will not come: lost, gone, or silent."""
        missing = []
        for rank in sorted({*range(self._peers)} - {*here}):
            if self._store.check([f"lost/{rank}"]):
                self.lose(rank, self._store.get(f"lost/{rank}").decode())
                missing.append(rank)
            elif self._store.check([f"left/{rank}"]):
                self.lose(rank, "it has closed its session, and others have not")
                missing.append(rank)
            elif self._silent(rank, since):
                self.lose(
                    rank, f"nothing was heard of it for {self._silence:g} s, while others waited for it"
                )
                missing.append(rank)
        return missing

    def _silent(self, rank: int, since: float) -> bool:
        key, now = f"alive/{rank}", time.monotonic()
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if self._heard.get(rank, ("", since))[0] != beat or rank not in self._heard:
            self._heard[rank] = beat, now
        return now - max(since, self._heard[rank][1]) > self._silence

    def _check(self, members: list[int]) -> None:
        if self._rank not in members:
            why = self._store.get(f"lost/{self._rank}").decode()
            me = self._known_as[self._rank]
            raise PeerLost(
                f"the others took this rank, {me}, for gone ({why}), and go on without it: what it has "
                "trained since is lost"
            )
        gone = sorted({*range(self._peers)} - {*members})
        if not gone or self._allow_lost:
            return
        come = of_ranks([self._known_as[rank] for rank in members])
        raise self.lose(gone[0], f"it did not come where {come} were to be equal")

    def close(self) -> None:
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * POLL_SECONDS)
        with contextlib.suppress(dist.DistError):
            self._store.set(f"left/{self._rank}", "")
        self._store.close()


_SESSIONS: dict[str, int] = {}
"""The number of sessions in pairs that these ranks have begun: each has separate keys in the store."""


def joined_pairs(
    peers: TorchTransport, topology: PairTopology, seed: int, timeout: timedelta
) -> PairTransport:
    """Connect the ranks of a session that averages in pairs. A collective call.

    Raises:
        AttachError: one cannot be reached.
    """
    name = "-".join(map(str, ranks_of(peers.parent)))
    _SESSIONS[name] = _SESSIONS.get(name, 0) + 1
    store = default_store()
    # A store client serves one call at a time: a copy never waits for the program's calls.
    clone = getattr(store, "clone", lambda: store)()
    prefixed = PrefixStore(f"tacit/pairs/{name}/{_SESSIONS[name]}", clone)
    here, seconds = peers.place(), timeout.total_seconds()
    known_as = ranks_of(peers.parent)
    members = PairMembers(
        prefixed, here.rank, here.peers, topology.allow_lost, seconds, known_as, store_host()
    )
    try:
        transport = join(peers, topology, members, seed, seconds)
    except BaseException:
        members.close()
        raise
    members.report_to(transport.lose)
    return transport
