"""Who takes part: members agree on a record in a store whenever one of them comes, leaves or dies.

Training is cut into periods. A period has members in an order, which all of them read from one record.
Whoever wants another period arrives for the next one: a newcomer, a member whose round has failed. Then all
members arrive, each after its present step. When everybody who lives is there, one of them writes the record,
by a compare-and-set that only the first one wins. There is no leader, and the store does nothing but keep
texts, so a store that is started again is filled again by the members.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from textwrap import shorten
from typing import Annotated, Any, TypeVar

from tacit import checks, described
from tacit.environment import MEMBERS
from tacit.errors import AttachError, ConfigError, PeerLost
from tacit.failure.bounded_store import BoundedStore, KeyValueStore
from tacit.members.lives import ANSWER, BEAT, Lives, StoreLink, life_key
from tacit.members.record import GONE, Life, MemberArrival, Period, following
from tacit.members.ways import Watching, Way
from tacit.transports.replica_ranks import ReplicaRanks

T = TypeVar("T")
_log = logging.getLogger("tacit")

LOOK = 0.02
"""Seconds between two looks while members arrive."""
TELL = 3.0
"""Seconds of waiting after which it is logged what for."""
SETTLE = 1.5
"""Seconds that a newcomer leaves the members to write themselves into a store that it has found empty."""
_CALL = "\n"
"""Ends an arrival; an empty one calls all to arrive."""
WATCHED = 2
"""How many members each one watches: those after it in the order."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Replicas that may join, leave and die while training goes on, for `attach(..., members=)`.

    Args:
        min: fewer living members than this wait for others.
        max: a newcomer beyond this many waits until there is room.
        store: host:port of the store by which members find each other (`python -m tacit.members.store`); by
            default `TACIT_MEMBERS`.
        hub: in place of a store, host:port of a hub that members reach and that they need not reach each
            other (`python -m tacit.stores.server --min 1`), or of several with commas that take its place;
            with plus signs one for each share of the parameters. By default `TACIT_HUB`. The (first) hub
            says how many members there are to be, `min` and `max`.
        name: this replica's, for logs and errors; by default its host and process.
        shards: for a replica of one process beside replicas that FSDP2 shards: among how many ranks it does.
        silence: seconds after which a member that gives no sign of life is given up.
        patience: seconds to wait for the store, for enough members, or for room.
        quorum: so many members may end a round without those that have not begun it `grace` seconds after
            them; None: all that live wait for each other. Whoever was late comes back with what its own steps
            have changed.
        grace: see `quorum`.
        semi_synchronous: whether a member that has taken its period's steps goes on until all are ready for
            the round, in which means are weighed by steps; else it waits.

    Raises:
        ConfigError: a number is wrong.
    """

    min: int = 1
    max: int = 64
    store: str = ""
    hub: str = ""
    name: str = ""
    shards: int = 1
    silence: float = 5.0
    patience: float = 600.0
    quorum: int | None = None
    grace: float = 5.0
    semi_synchronous: bool = False

    def __post_init__(self) -> None:
        checks.whole("members: min", self.min, 1, None, "it is how many must be alive")
        checks.whole("members: max", self.max, self.min, None, "it is how many may take part, at least min")
        checks.whole("members: shards", self.shards, 1, None, "it is how many ranks share a sharded replica")
        checks.flag("members: semi_synchronous", self.semi_synchronous)
        for one, other in (("store", "hub"), ("quorum", "semi_synchronous")):
            if getattr(self, one) and getattr(self, other):
                raise ConfigError(f"members: {one} and {other} exclude each other: write one of them")
        if self.quorum is not None:
            checks.whole("members: quorum", self.quorum, 1, self.max, "it is how many may end a round")
        for name, least in (("silence", 4 * BEAT), ("patience", 0.0), ("grace", BEAT)):
            given = getattr(self, name)
            if not checks.is_real(given) or not least <= given < float("inf"):
                raise ConfigError(f"members: {name}={given!r} is no number of seconds from {least:g} up")

    def address(self) -> tuple[str, int]:
        """Host and port of the store.

        Raises:
            ConfigError: nothing names one, or it is no host:port.
        """
        text = self.store or os.environ.get(MEMBERS, "")
        host, _, port = text.rpartition(":")
        if not text:
            write = f"write Members(store='HOST:29400') or set {MEMBERS}=HOST:29400"
            raise ConfigError(f"no store: start one by python -m tacit.members.store --port 29400, {write}")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"members: store={text!r} is no host:port: write Members(store='HOST:29400')")
        return host.strip("[]"), int(port)


class Roster:
    """One member's view of all. Each rank of a member has one, and the first of them arrives for all.

    Args:
        given: as the user has written it.
        ranks: the member's.
        life: reads what a sign of life says, besides its number.
        on_call: called once a period, in the roster's thread, when somebody has arrived for the next one.
        on_wait: called again and again while this member waits for a period; it may end the process.
        way: how members find each other.

    Attributes:
        id: unique to this replica, as long as it lives.
        name: for logs and errors.
        period: the present one; number 0 before the first.
        called: set when somebody has arrived for the next period.
        ask: asks what members find each other by, for the thread that trains and those that connect for it.
        away_since: since when what members find each other by has not answered; 0: it has.
    """

    def __init__(
        self,
        given: Members,
        ranks: ReplicaRanks,
        life: Callable[[], Mapping[str, Any]],
        on_call: Callable[[], None],
        on_wait: Callable[[], None],
        way: Way,
    ) -> None:
        self._given, self._ranks, self._life = given, ranks, life
        self._on_call, self._on_wait = on_call, on_wait
        self.way = way
        self.name, unique = ranks.first(lambda: (given.name or _own_name(), uuid.uuid4().hex[:12]))
        self.id = f"{self.name}/{unique}"
        self.period = Period()
        self.called = threading.Event()
        self.away_since = 0.0
        self._beats = 0
        self._described = ""
        self._changing = threading.Lock()
        self._waiting = (-1, 0.0)
        self._slow: set[str] = set()
        self.ask = StoreLink(way, given.patience, lambda: self.away_since)
        self._over = threading.Event()
        self._ties: dict[int, Watching] = {}
        self._thread = threading.Thread(target=self._watch, name="tacit-roster", daemon=True)

    @property
    def place(self) -> int:
        """This member's rank in the present period."""
        return self.period.place_of(self.id)

    def begin(self, described_by: Mapping[str, str]) -> None:
        """Connect, check that this replica trains what the others do, and give signs of life.

        Args:
            described_by: what must be equal on all members, by name.

        Raises:
            AttachError: it is not; the message says what differs.
            PeerLost: the store cannot be reached.
        """
        text = json.dumps(dict(described_by))
        limits = self.ask.store(lambda store: store.get("limits") if store.check(["limits"]) else b"")
        if limits:
            least, most = json.loads(limits.decode())
            self._given = replace(self._given, min=least, max=most)
        theirs = json.loads(self.ask.store(lambda store: store.compare_set("trains", "", text)).decode())
        differing = [what for what in described_by if theirs.get(what) != described_by[what]]
        if differing:
            what = differing[0]
            mine, other = (shorten(each.get(what, "nothing"), 90) for each in (described_by, theirs))
            raise AttachError(
                f"this replica has another {what} than the training for which the members' store was first "
                f"used: give it the same one, or start another store for it ({mine} here, {other} there)"
            )
        self._described = text
        with contextlib.suppress(OSError, RuntimeError):  # without them, silence tells who has died
            for rank in self._ranks.own:
                self._ties[rank] = self.way.ties(f"{self.id}/{rank}")
        self._thread.start()

    # ---- periods --------------------------------------------------------------------------------------

    def meet(self, mine: MemberArrival) -> Period:
        """Arrive for the next period, and wait for its record. A collective call of this member's ranks.

        Args:
            mine: what this process says of itself.

        Raises:
            AttachError: another member has this one's name.
            PeerLost: there are fewer than `min` members, or no room, or no store, for longer than `patience`.
        """
        addresses = [self._ties[rank].address if rank in self._ties else ("", 0) for rank in self._ranks.own]
        own = [
            replace(said, address=address, port=port)
            for said, (address, port) in zip(mine.ranks, addresses, strict=True)
        ]
        each = self._ranks.gathered(replace(mine, ranks=own))
        ready, ranks = all(one.ready for one in each), [said for one in each for said in one.ranks]
        known = self.period.number
        ours = replace(mine, id=self.id, name=self.name, ready=ready, known=known, ranks=ranks)
        period = self._ranks.first(lambda: self._met(ours))
        with self._changing:
            self.called.clear()
            self.period = period
        return period

    def _met(self, mine: MemberArrival) -> Period:
        began, arrived_for, arrived_at, now = time.monotonic(), 0, 0.0, self.period
        lives, told, may_come = Lives(self._given.silence), False, self.place >= 0
        text, known, there = "", "", dict[str, MemberArrival]()
        for look in itertools.count():
            self._on_wait()
            number = now.number + 1
            if may_come and (arrived_for, arrived_at) != (number, self.ask.since):  # it may be empty again
                ready = mine.ready and now.number == self.period.number
                arrived_for, arrived_at = number, self.ask.since
                self.ask.store(partial(_arrive, number=number, mine=replace(mine, ready=ready)))
            if text == known:
                others = {each.id: each for each in now.members} | there
                text, there, late = self._looked(number, lives, others)
            if not text and time.monotonic() - max(began, self.ask.since) < SETTLE:
                time.sleep(BEAT)
                continue
            if text != known:
                now, known = Period.of(text), text
            mine_now = now.place_of(self.id) >= 0
            if arrived_for and now.number >= arrived_for and (mine_now or mine.closing):
                return now
            if number != now.number + 1:  # what has been asked for is over
                there, may_come = {}, mine_now
                continue
            living = [] if mine_now else [each for each in now.members if lives.is_alive(each)]
            may_come = False
            if any(each.name == self.name for each in living):
                why = f"a member named {self.name!r} is at work: give each replica another name"
                if time.monotonic() - began > 2 * self._given.silence:
                    raise AttachError(why)
            elif len(living) >= self._given.max:
                why = f"there are {self._given.max} members already, as many as max allows"
            else:
                may_come = True
                if (arrived_for, arrived_at) != (number, self.ask.since):
                    continue
                why, text = self._close(known, now, there, late, lives)
                if text != known:
                    continue
            if why and not told and time.monotonic() - began > TELL:
                told = True
                _log.warning("%s waits, %g s at most: %s", self.name, self._given.patience, why)
            if why and time.monotonic() - began > self._given.patience:
                raise PeerLost(f"waited {self._given.patience:g} s for a period of training: {why}")
            time.sleep(LOOK if look < 50 else BEAT)
        raise AssertionError

    def _looked(
        self, number: int, lives: Lives, members: Mapping[str, MemberArrival]
    ) -> tuple[str, dict[str, MemberArrival], list[str]]:
        """One look: the present record, who has arrived for a period, who is left out of it; and lives."""
        signs = lives.keys(members.values())
        keys = ["period", f"arrived/{number}", f"late/{number}", *signs]
        text, arrived, late, *said = self.ask.texts(keys)
        lives.hear(signs, said, self.ask.since)
        return text or self.ask.store(self._filled), arrivals(arrived), [*json.loads(late or "[]")]

    def _close(
        self,
        text: str,
        now: Period,
        there: Mapping[str, MemberArrival],
        late: Sequence[str],
        lives: Lives,
    ) -> tuple[str, str]:
        """Write the record if everybody is there; returns who or what is missing, and the present record."""
        missing = [each for each in now.members if each.id not in there]
        if any(each.id not in late and lives.is_alive(each) for each in missing):
            return "", text  # they take their present step to its end
        here = {id: each for id, each in there.items() if now.place_of(id) >= 0 or lives.is_alive(each)}
        if len(here) < self._given.min:
            why = f"there are {len(here)} of the {self._given.min} members that min asks for"
            return f"{why}: start others, or write a lower min", text
        found = following(now, here, {each.id: lives.last_of(each) for each in missing}, self._given.max)
        return "", self.ask.store(lambda store: store.compare_set("period", text, found.to_text())).decode()

    def _filled(self, store: KeyValueStore) -> str:
        """The text of the present record, in a store that was started again as it was before."""
        kept = self.period.to_text() if self.period.number else ""
        return store.compare_set("period", "", kept).decode() if kept else ""

    def all_wait(self, what: str) -> bool | None:
        """Whether all living members wait for this after the same step. None: not yet.

        False: one has gone on beyond this one. If all wait, after different steps, all are called together.
        """
        mine, number = Life(**self._life()), self.period.number
        lives = self.ask.lives([each for each in self.period.members if each.id != self.id])
        there = [each for each in lives if each is not None and (each.period == number or each.waits == GONE)]
        # The next round of one that goes on may have begun before its step is taken.
        ahead = [each for each in there if each.step > mine.step or each.begun > mine.begun]
        if any(each.waits not in (what, GONE) for each in ahead):
            return False
        if len(there) < len(lives) or any(each.waits not in (what, GONE) for each in there):
            return None
        if any(each.waits == what and (each.step, each.begun) != (mine.step, mine.begun) for each in there):
            self.call()
            return None
        return True

    def is_away(self) -> bool:
        """Whether what members find each other by does not answer; it is asked, if it did when last asked."""
        if not self.away_since:
            ask, asked = StoreLink(self.way, 0.0), time.monotonic()
            try:
                ask.store(lambda store: store.check(["period"]))
            except PeerLost:
                self.away_since = asked
            finally:
                ask.close()
        return bool(self.away_since)

    def call(self) -> None:
        """Have all members come together for another period."""
        number = self.period.number + 1
        with contextlib.suppress(PeerLost):
            self.ask.store(partial(_call, number=number))

    def leave(self, calls: bool) -> None:
        """Tell the others that this member goes, and give no more signs of life.

        `calls`: whether the others are to go on in another period; else they end, too.
        """
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER)
        self.ask.close()
        self.ask = StoreLink(self.way, 0.0)
        if self._described:  # else it has not been there
            with contextlib.suppress(PeerLost):
                gone = json.dumps(asdict(replace(Life(**self._life()), waits=GONE)))
                for rank in self._ranks.own:
                    self.ask.store(partial(_set, key=life_key(self.id, rank), text=gone))
        if self.place >= 0 and calls and len(self.period.members) > 1:
            self.call()
        self.ask.close()

    # ---- the thread -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give signs of life, look after the next members, and listen for calls."""
        ask, filled = StoreLink(self.way, 0.0), 0.0
        lives, period = Lives(self._given.silence, self._ranks.own), 0
        while not self._over.wait(lives.pause()):
            with contextlib.suppress(PeerLost, AttachError):  # the thread that trains raises them
                self._beats += 1
                text = json.dumps(asdict(Life(beat=self._beats, period=self.period.number, **self._life())))
                if period != self.period.number:
                    lives, period = Lives(self._given.silence, self._ranks.own), self.period.number
                number, watched = period + 1, self._watched()
                keys = lives.keys(watched)

                def look(
                    store: BoundedStore,
                    text: str = text,
                    keys: Sequence[str] = (f"arrived/{number}", *keys),
                    lives: Lives = lives,
                    filled: float = filled,
                ) -> list[str]:
                    if ask.since != filled:  # one that has been started again is empty
                        store.compare_set("trains", "", self._described)
                        self._filled(store)
                        lives.fill(store)
                    for rank in self._ranks.own:
                        store.set(life_key(self.id, rank), text)
                    return store.texts(keys)

                asked = time.monotonic()
                try:
                    called, *signs = ask.store(look)
                except (PeerLost, AttachError):
                    self.away_since = self.away_since or asked
                    raise
                self.away_since, filled = 0.0, ask.since
                lives.hear(keys, signs, filled)
                lost = self._lost(ask, lives, watched)
                if lost and not called:
                    _log.warning("%s gives no sign of life: the others go on without it", lost[0].name)
                    ask.store(partial(_call, number=number))
                    called = _CALL
                if not called and (late := self._late(ask)):
                    _log.warning("%s is late: the others end their round without it", late[0].name)
                    ask.store(partial(_leave_out, number=number, ids=[each.id for each in late]))
                    called = _CALL
                with self._changing:
                    present = number == self.period.number + 1 and self.place >= 0
                    if called and present and not self.called.is_set():
                        self.called.set()
                        self._on_call()
        ask.close()
        for ties in self._ties.values():
            ties.close()

    def _lost(self, ask: StoreLink, lives: Lives, watched: Sequence[MemberArrival]) -> list[MemberArrival]:
        """Of the watched members, those that are dead; that a process has ended is told to all."""
        lost = [each for each in watched if not lives.is_alive(each)]
        for rank, ties in self._ties.items():
            at = {f"{each.id}/{rank}": each.ranks[rank] for each in watched}
            ended = ties.broken({name: (on.address, on.port) for name, on in at.items() if on.port})
            lost += [each for each in watched if f"{each.id}/{rank}" in ended and each not in lost]
        for each in lost:  # one that only was silent overwrites it, and comes back
            for rank in self._ranks.own:
                gone = replace(lives.last_of(each, rank) or Life(), waits=GONE)
                ask.store(partial(_set, key=life_key(each.id, rank), text=json.dumps(asdict(gone))))
        return lost

    def _late(self, ask: StoreLink) -> list[MemberArrival]:
        """The members that a quorum has waited for long enough; without one they are told, and waited for."""
        quorum, place, now = self._given.quorum, self.place, time.monotonic()
        begun, waits = self._life()["begun"], self._life()["in_round"]
        if place < 0 or not waits or self._waiting[0] != begun:
            self._waiting = begun, now
            return []
        patience = self._given.grace + (self._given.silence if quorum is None else 0)
        if now - self._waiting[1] < patience:
            return []
        rank = self._ranks.rank
        others = [each for each in self.period.members if each.id != self.id]
        lives = zip(others, ask.lives(others, rank), strict=True)
        late = [each for each, life in lives if life is None or life.begun < begun]
        if quorum is None:
            self._waiting = begun, float("inf")
            for each in [each for each in late if each.name not in self._slow]:
                self._slow.add(each.name)
                text = (
                    "%s lives, and has not begun a round that others have waited in for %g s. If it is slow "
                )
                text += "for ever, Members(quorum=%d) has rounds end without it"
                _log.warning(text, each.name, patience, max(1, len(self.period.members) - 1))
            return []
        return late if len(self.period.members) - len(late) >= quorum else []

    def _watched(self) -> list[MemberArrival]:
        """The members after this one, in the order of the ring."""
        members, place = self.period.members, self.place
        after = members[place + 1 :] + members[: max(place, 0)] if place >= 0 else []
        return after[:WATCHED]


def _own_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def arrivals(text: str) -> dict[str, MemberArrival]:
    """Who has arrived for a period, by id, in the order of arrival; `text`: a line of each."""
    return {each.id: each for each in map(_arrival, filter(None, text.split(_CALL)))}


@lru_cache(256)
def _arrival(line: str) -> MemberArrival:
    found: MemberArrival = described.read(line, Annotated[MemberArrival, described.JSON], "an arrival")
    return found


def _arrive(store: BoundedStore, number: int, mine: MemberArrival) -> None:
    store.append(f"arrived/{number}", json.dumps(asdict(mine)) + _CALL)


def _leave_out(store: BoundedStore, number: int, ids: list[str]) -> None:
    store.compare_set(f"late/{number}", "", json.dumps(ids))
    _call(store, number)


def _set(store: KeyValueStore, key: str, text: str) -> None:
    store.set(key, text)


def _call(store: BoundedStore, number: int) -> None:
    store.append(f"arrived/{number}", _CALL)
