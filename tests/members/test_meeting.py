"""Members that come together while their store loses what they have said."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

import tacit
from in_threads import in_threads
from tacit.api.away import way_of
from tacit.api.semi_synchronous import SemiSynchronous
from tacit.errors import PeerLost
from tacit.members.record import MemberArrival, Period
from tacit.members.roster import Roster
from tacit.transports.member_links import served
from tacit.transports.replica_ranks import ReplicaRanks


def begun(name: str, at: str, rounds: int = 0, **more: Any) -> Roster:
    given = tacit.Members(name=name, store=at, min=2, patience=10.0, **more)

    def life() -> dict[str, Any]:
        return {"begun": rounds, "in_round": rounds > 0}

    def nothing() -> None:
        return

    ranks = ReplicaRanks(1, timedelta(seconds=10))
    roster = Roster(given, ranks, life, nothing, nothing, way_of(given))
    roster.begin({})
    return roster


def test_who_waits_arrives_again_where_the_store_is_another_one() -> None:
    store = served("127.0.0.1", 0)
    a, b = (begun(name, f"127.0.0.1:{store.port}") for name in "ab")
    found: list[Period] = []
    arrival = MemberArrival("", "")
    waits = threading.Thread(target=lambda: found.append(a.meet(arrival)), daemon=True)
    waits.start()
    while not store.get("arrived/1"):
        time.sleep(0.01)
    store.delete_key("arrived/1")
    a.ask.since += 1  # as if it had connected anew
    found.append(b.meet(arrival))
    waits.join(10)
    assert [{each.name for each in period.members} for period in found] == [{"a", "b"}] * 2
    one, other = (SemiSynchronous(each, True, None) for each in (a, b))
    said = [one._all_ready(0), other._all_ready(0), one._all_ready(0), one._all_ready(1)]
    assert said == [False, True, True, False]
    for semi in (one, other):
        semi.close()
    for each in (a, b):
        each.leave(calls=False)


def test_a_newcomer_for_whom_there_is_no_room_any_more_calls_nobody() -> None:
    store = served("127.0.0.1", 0)
    x, y = (MemberArrival(name, name) for name in "xy")
    store.set("period", Period(1, [x]).to_text())
    late = begun("late", f"127.0.0.1:{store.port}", silence=60.0)
    late._given = replace(late._given, max=2, patience=0.0)

    def another_is_faster() -> None:
        while not store.get("arrived/2"):
            time.sleep(0.01)
        store.set("period", Period(2, [x, y]).to_text())

    threading.Thread(target=another_is_faster, daemon=True).start()
    with pytest.raises(PeerLost, match="there are 2 members already"):
        late.meet(MemberArrival("", ""))
    assert not store.get("arrived/3")
    late.leave(calls=False)


def test_who_is_slow_for_ever_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Without a quorum it is waited for; once is enough."""
    store = served("127.0.0.1", 0)
    names = {"fast": 1, "slow": 0}
    at, quick = f"127.0.0.1:{store.port}", {"silence": 2.0, "grace": 0.25}
    each = {name: begun(name, at, rounds, **quick) for name, rounds in names.items()}
    in_threads(2, lambda i: [*each.values()][i].meet(MemberArrival("", "")), seconds=10)
    until = time.monotonic() + 10
    while "for ever" not in caplog.text and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)  # in which it is not told again
    for one in each.values():
        one.leave(calls=False)
    (told,) = [each for each in caplog.messages if "for ever" in each]
    assert told.startswith("slow lives, and has not begun a round that others have waited in for 2.25 s.")
    assert "Members(quorum=1) has rounds end without it" in told


class Answers:
    """A store that answers the thread that gives signs of life when it may."""

    def __init__(self, before: Callable[[], Any]) -> None:
        self._before = before

    def check(self, keys: list[str]) -> bool:
        return not keys

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self._before()
        return value.encode()

    def append(self, key: str, value: str) -> None:
        return

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [b"" for _ in keys]

    def set(self, key: str, value: str) -> None:
        return


class BusyWay:
    """A way to such a store, by which all goes."""

    name, start, longest_pause, carries, hubs = "the hub", "a command", 2.0, True, 1

    def __init__(self) -> None:
        self.asked, self.may_answer = threading.Event(), threading.Event()

    def connected(self, seconds: float) -> Any:
        watches = threading.current_thread().name == "tacit-roster"
        return Answers(self._wait if watches else lambda: None)

    def _wait(self) -> None:
        self.asked.set()
        self.may_answer.wait(10)

    def ties(self, me: str) -> Any:
        raise RuntimeError("none")


def test_a_hub_that_is_being_asked_is_not_away() -> None:
    """A round that fails meanwhile is made again, and not missed."""
    way: Any = BusyWay()
    ranks, nothing = ReplicaRanks(1, timedelta(seconds=10)), lambda: None
    life: dict[str, Any] = {"begun": 0, "in_round": False}
    roster = Roster(tacit.Members(name="a", hub="hub:1"), ranks, lambda: life, nothing, nothing, way)
    roster.begin({})
    assert way.asked.wait(10)
    assert not roster.away_since
    assert not roster.is_away()
    way.may_answer.set()
    roster.leave(calls=False)
