"""Members that come together while their store loses what they have said."""

import threading
from datetime import timedelta
from typing import Any

import tacit
from tacit.api.away import way_of
from tacit.members.record import MemberArrival, Period
from tacit.members.roster import Roster
from tacit.transports.member_links import served
from tacit.transports.replica_ranks import ReplicaRanks


def begun(name: str, at: str) -> Roster:
    given = tacit.Members(name=name, store=at, min=2, patience=10.0)

    def life() -> dict[str, Any]:
        return {"begun": 0, "in_round": False}

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
    store.wait(["arrived/1/1"], timedelta(seconds=10))
    for key in ("arrived/1", "arrived/1/1"):
        store.delete_key(key)
    a._ask.since += 1  # as if it had connected anew
    found.append(b.meet(arrival))
    waits.join(10)
    assert [{each.name for each in period.members} for period in found] == [{"a", "b"}] * 2
    for each in (a, b):
        each.leave(calls=False)
