"""Who takes part: members agree on a record in a store whenever one of them comes, leaves or dies.

Training is cut into periods. A period has members in an order, which all of them read from one record.
Whoever wants another period arrives for the next one: a newcomer, a member whose round has failed. Then all
members arrive, each after its present step. When everybody who lives is there, one of them writes the record,
by a compare-and-set that only the first one wins. There is no leader, and the store does nothing but keep
texts, so a store that is started again is filled again by the members.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from tacit import checks, described
from tacit.described import Whole
from tacit.environment import MEMBERS
from tacit.errors import AttachError, ConfigError, PeerLost, first_line
from tacit.failure.bounded_store import BoundedStore, KeyValueStore
from tacit.transports.member_links import connected

T = TypeVar("T")
_log = logging.getLogger("tacit")

BEAT = 0.25
"""Seconds between two signs of life, and between two looks at whether somebody has called."""
LOOK = 0.02
"""Seconds between two looks while members arrive."""
ANSWER = 5.0
"""Seconds in which the store has to answer a call."""
SETTLE = 1.5
"""Seconds that a newcomer leaves the members to write themselves into an empty store."""
WATCHED = 2
"""How many members each one watches: those after it in the order."""
GONE = "gone"
"""What a member that has left waits for."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """Replicas that may join, leave and die while training goes on, for `attach(..., members=)`.

    Args:
        min: fewer living members than this wait for others.
        max: a newcomer beyond this many waits until there is room.
        store: host:port of the store by which members find each other (`python -m tacit.members.store`); by
            default `TACIT_MEMBERS`.
        name: this replica's, for logs and errors; by default its host and process.
        silence: seconds after which a member that gives no sign of life is given up.
        patience: seconds to wait for the store, for enough members, or for room.

    Raises:
        ConfigError: a number is wrong.
    """

    min: int = 1
    max: int = 64
    store: str = ""
    name: str = ""
    silence: float = 5.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        checks.whole("members: min", self.min, 1, None, "it is how many must be alive")
        checks.whole("members: max", self.max, self.min, None, "it is how many may take part, at least min")
        for name, least in (("silence", 4 * BEAT), ("patience", 0.0)):
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
            raise ConfigError(
                f"members have no store: start one by python -m tacit.members.store --port 29400, and write "
                f"Members(store='HOST:29400') or set {MEMBERS}=HOST:29400"
            )
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"members: store={text!r} is no host:port: write Members(store='HOST:29400')")
        return host.strip("[]"), int(port)


@dataclass(frozen=True)
class MemberArrival:
    """What a member says of itself when it arrives for a period.

    Attributes:
        id: unique to this process.
        name: for logs and errors.
        ready: whether it has a state of the period before; else it takes that of another.
        round: how many rounds it has finished.
        step: how many steps it has taken, with the one in hand.
        acted: whether what follows that step is over.
        closing: whether it has no more steps to take.
        epoch: the epoch of its data.
        taken: how many samples of its share of that epoch it has taken since the period began.
    """

    id: str
    name: str
    ready: bool = False
    round: Whole = 0
    step: Whole = 0
    acted: bool = True
    closing: bool = False
    epoch: Whole = 0
    taken: Whole = 0

    @property
    def progress(self) -> tuple[int, int, bool]:
        """How far it is, for comparisons."""
        return self.round, self.step, self.acted


@dataclass(frozen=True)
class Period:
    """A time in which the same members take part.

    Attributes:
        number: from 1.
        members: in the order of their ranks.
        source: the rank whose state the others take, if they have not come as far.
        epoch: the epoch of the data.
        history: what the members of each earlier period took of that epoch, in their order.
    """

    number: Whole = 0
    members: list[MemberArrival] = field(default_factory=list)
    source: Whole = 0
    epoch: Whole = 0
    history: list[list[Whole]] = field(default_factory=list)

    def place_of(self, id: str) -> int:
        """The rank of a member, or -1."""
        return next((i for i, each in enumerate(self.members) if each.id == id), -1)

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Period:
        """From `to_text`; the empty text is the time before the first period."""
        found: Period = described.read(text, Annotated[Period, described.JSON], "the members' record")
        return found


@dataclass(frozen=True)
class _Life:
    """A member's sign of life.

    Attributes:
        beat: counts them.
        step: how many steps it has taken.
        waits: what it waits for all others to do: "close" or "sync"; "": nothing.
        taken: samples, as in `MemberArrival`.
    """

    beat: Whole = 0
    step: Whole = 0
    waits: str = ""
    epoch: Whole = 0
    taken: Whole = 0


class Roster:
    """One member's view of all.

    Args:
        given: as the user has written it.
        life: reads what a sign of life says: step, what it waits for, epoch and samples taken.
        on_call: called once a period, in the roster's thread, when somebody has arrived for the next one.

    Attributes:
        id: unique to this process.
        name: for logs and errors.
        period: the present one; number 0 before the first.
        called: set when somebody has arrived for the next period.
    """

    def __init__(
        self,
        given: Members,
        life: Callable[[], Mapping[str, Any]],
        on_call: Callable[[], None],
    ) -> None:
        self._given, self._life, self._on_call = given, life, on_call
        self._address = given.address()
        self.name = given.name or f"{socket.gethostname()}-{os.getpid()}"
        self.id = f"{self.name}/{uuid.uuid4().hex[:12]}"
        self.period = Period()
        self.called = threading.Event()
        self._beats = 0
        self._described = ""
        self._changing = threading.Lock()
        self._ask = _StoreLink(self._address, given.patience)
        self._over = threading.Event()
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
        theirs = json.loads(self._ask.store(lambda store: store.compare_set("trains", "", text)).decode())
        differing = [what for what in described_by if theirs.get(what) != described_by[what]]
        if differing:
            what = differing[0]
            raise AttachError(
                f"this replica has another {what} than the members that train already: "
                f"{described_by[what]:.200} here, and {theirs.get(what, 'nothing')!s:.200} there. Give it "
                "the same one, or use another store"
            )
        self._described = text
        self._thread.start()

    # ---- periods --------------------------------------------------------------------------------------

    def meet(self, mine: MemberArrival) -> Period:
        """Arrive for the next period, and wait for its record.

        Raises:
            PeerLost: there are fewer than `min` members, or no room, or no store, for longer than `patience`.
        """
        mine = replace(mine, id=self.id, name=self.name)
        began, arrived_for, member_of = time.monotonic(), 0, self.period.number
        lives = _Lives(self._ask, self._given.silence)
        while True:
            text = self._present()
            now = Period.of(text) if text else Period()
            if not text and time.monotonic() - began < SETTLE:
                time.sleep(BEAT)
                continue
            mine_now = now.place_of(self.id) >= 0
            if arrived_for and now.number >= arrived_for and (mine_now or mine.closing):
                with self._changing:
                    self.called.clear()
                    self.period = now
                return now
            ready = mine.ready and now.number == member_of
            living = [] if mine_now else lives.of(now.members)
            if any(each.name == self.name for each in living):
                why = f"a member named {self.name!r} is at work: give each replica another name"
                if time.monotonic() - began > 2 * self._given.silence:
                    raise AttachError(why)
            elif len(living) >= self._given.max:
                why = f"there are {self._given.max} members already, as many as max allows"
            else:
                if arrived_for != now.number + 1:
                    arrived_for = now.number + 1
                    self._arrive(arrived_for, replace(mine, ready=ready))
                why = self._close(text, now, lives)
            if why and time.monotonic() - began > self._given.patience:
                raise PeerLost(f"waited {self._given.patience:g} s for a period of training: {why}")
            time.sleep(LOOK)

    def _arrive(self, number: int, mine: MemberArrival) -> None:
        def arrive(store: KeyValueStore) -> None:
            at = store.add(f"arrived/{number}", 1)
            store.set(f"arrived/{number}/{at}", json.dumps(asdict(mine)))

        self._ask.store(arrive)

    def _close(self, text: str, now: Period, lives: _Lives) -> str:
        """Write the record if everybody is there; else returns who or what is missing."""
        there = self._ask.store(lambda store: _arrivals(store, now.number + 1))
        missing = [each for each in now.members if each.id not in there]
        if lives.of(missing):
            return ""  # they take their present step to its end
        if len(there) < self._given.min:
            return f"there are {len(there)} members, and min is {self._given.min}"
        following = _next(now, there, {each.id: lives.last(each) for each in missing}, self._given.max)
        self._ask.store(lambda store: store.compare_set("period", text, following.to_text()))
        return ""

    def _present(self) -> str:
        """The text of the present record; of a store that was started again, as it was before."""
        return self._ask.store(self._present_in)

    def _present_in(self, store: KeyValueStore) -> str:
        if store.check(["period"]):
            return store.get("period").decode()
        kept = self.period.to_text() if self.period.number else ""
        return store.compare_set("period", "", kept).decode() if kept else ""

    def all_wait(self, what: str, step: int) -> bool | None:
        """Whether all living members wait for this, None: not yet; False: one has gone on beyond `step`."""
        lives = [self._ask.life(each.id) for each in self.period.members if each.id != self.id]
        if any(each is not None and each.waits not in (what, GONE) and each.step > step for each in lives):
            return False
        return all(each is not None and each.waits in (what, GONE) for each in lives) or None

    def call(self) -> None:
        """Have all members come together for another period."""
        number = self.period.number + 1
        with contextlib.suppress(PeerLost):
            self._ask.store(lambda store: store.add(f"called/{number}", 1))

    def leave(self, calls: bool) -> None:
        """Tell the others that this member goes, and give no more signs of life.

        `calls`: whether the others are to go on in another period; else they end, too.
        """
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER)
        if self.place >= 0:
            with contextlib.suppress(PeerLost):
                gone = json.dumps(asdict(_Life(waits=GONE)))
                self._ask.store(lambda store: store.set(f"life/{self.id}", gone))
            if calls and len(self.period.members) > 1:
                self.call()
        self._ask.close()

    # ---- the thread -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give signs of life, look after the next members, and listen for calls."""
        ask = _StoreLink(self._address, 0.0)
        lives, period = _Lives(ask, self._given.silence), 0
        while not self._over.wait(BEAT):
            with contextlib.suppress(PeerLost):
                self._beats += 1
                text = json.dumps(asdict(_Life(beat=self._beats, **self._life())))
                number = self.period.number + 1
                names = [f"called/{number}", f"arrived/{number}"]

                def look(store: KeyValueStore, text: str = text, names: Sequence[str] = names) -> bool:
                    store.compare_set("trains", "", self._described)
                    self._present_in(store)
                    store.set(f"life/{self.id}", text)
                    return any(store.check([name]) for name in names)

                called = ask.store(look)
                if period != self.period.number:
                    lives, period = _Lives(ask, self._given.silence), self.period.number
                lost = [each for each in self._watched() if not lives.is_alive(each)]
                if lost and not called:
                    _log.warning("%s gives no sign of life: the others go on without it", lost[0].name)
                    ask.store(partial(_add, name=names[0]))
                    called = True
                with self._changing:
                    present = number == self.period.number + 1 and self.place >= 0
                    if called and present and not self.called.is_set():
                        self.called.set()
                        self._on_call()
        ask.close()

    def _watched(self) -> list[MemberArrival]:
        """The members after this one, in the order of the ring."""
        members, place = self.period.members, self.place
        after = members[place + 1 :] + members[: max(place, 0)] if place >= 0 else []
        return after[:WATCHED]


def _arrivals(store: KeyValueStore, number: int) -> dict[str, MemberArrival]:
    """Who has arrived for a period, by id, in the order of arrival."""
    found: dict[str, MemberArrival] = {}
    count = store.add(f"arrived/{number}", 0)
    for key in (f"arrived/{number}/{i + 1}" for i in range(count)):
        if store.check([key]):  # else it has counted itself, and not yet said who it is
            text = store.get(key).decode()
            each: MemberArrival = described.read(text, Annotated[MemberArrival, described.JSON], "an arrival")
            found[each.id] = each
    return found


def _next(
    now: Period, there: Mapping[str, MemberArrival], gone: Mapping[str, _Life | None], most: int
) -> Period:
    """The period after `now`: those of its members that have arrived, in its order, then the newcomers."""
    old = [there[each.id] for each in now.members if each.id in there]
    first = max((each for each in old if each.ready), key=lambda each: each.progress, default=None)
    passed = first is not None and not first.acted  # whoever has closed behind it would miss its next round
    stay = [each for each in old if not (each.closing and passed)]
    new = [each for id, each in there.items() if now.place_of(id) < 0 and not each.closing]
    members = [*stay, *new][:most]
    epoch = max((each.epoch for each in old), default=now.epoch)
    taken = [
        there[each.id].taken
        if each.id in there and there[each.id].epoch == epoch
        else life.taken
        if (life := gone.get(each.id)) is not None and life.epoch == epoch
        else 0
        for each in now.members
    ]
    history = [*(now.history if epoch == now.epoch else ()), *([taken] if taken else ())]
    source = members.index(first) if first is not None and first in members else 0
    return Period(now.number + 1, members, source, epoch, history)


def _add(store: KeyValueStore, name: str) -> None:
    store.add(name, 1)


class _Lives:
    """Which members are alive, by their signs of life since this object was made.

    Args:
        ask: asks the store.
        silence: seconds after which one without a new sign is dead.
    """

    def __init__(self, ask: _StoreLink, silence: float) -> None:
        self._ask, self._silence = ask, silence
        self._seen: dict[str, tuple[_Life | None, float]] = {}

    def is_alive(self, member: MemberArrival) -> bool:
        """Whether the member has given a sign of life lately, and has not left."""
        life, now = self._ask.life(member.id), time.monotonic()
        last, since = self._seen.get(member.id, (None, now))
        if life != last or member.id not in self._seen:
            since = now
        self._seen[member.id] = life, since
        return now - since < self._silence and (life is None or life.waits != GONE)

    def last(self, member: MemberArrival) -> _Life | None:
        """What its last sign of life said."""
        return self._seen.get(member.id, (None, 0.0))[0]

    def of(self, members: Sequence[MemberArrival]) -> list[MemberArrival]:
        """Those that are alive."""
        return [each for each in members if self.is_alive(each)]


class _StoreLink:
    """Asks the store, and connects again where that has failed.

    Args:
        address: of the store.
        patience: seconds to go on trying.
    """

    def __init__(self, address: tuple[str, int], patience: float) -> None:
        self._address, self._patience = address, patience
        self._bounded: BoundedStore | None = None

    def store(self, call: Callable[[KeyValueStore], T]) -> T:
        """The answer of the store.

        Raises:
            PeerLost: it does not answer for longer than `patience`.
        """
        began = time.monotonic()
        while True:
            try:
                if self._bounded is None:
                    self._bounded = BoundedStore(connected(*self._address, timeout=ANSWER), ANSWER)
                return call(self._bounded)
            except RuntimeError as error:
                self.close()
                if time.monotonic() - began >= self._patience:
                    host, port = self._address
                    raise PeerLost(
                        f"the members' store at {host}:{port} does not answer for {self._patience:g} s "
                        f"({first_line(error)}): start it there, by python -m tacit.members.store --port "
                        f"{port}; members that live write themselves in again"
                    ) from error
                time.sleep(BEAT)

    def life(self, id: str) -> _Life | None:
        """The last sign of life of a member."""

        def read(store: KeyValueStore) -> str:
            return store.get(key).decode() if store.check([key := f"life/{id}"]) else ""

        text = self.store(read)
        if not text:
            return None
        found: _Life = described.read(text, Annotated[_Life, described.JSON], "a sign of life")
        return found

    def close(self) -> None:
        """End the connection."""
        if self._bounded is not None:
            self._bounded.close()
            self._bounded = None
