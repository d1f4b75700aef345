"""What members know of each other by their signs of life, with a store that is a dict."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tacit.errors import PeerLost
from tacit.members.lives import BEAT, Lives, StoreLink, life_key
from tacit.members.record import GONE, Life, MemberArrival


class Texts(dict[str, str]):
    """A store."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self.setdefault(key, value).encode()


def test_the_last_words_of_the_dead_come_into_a_store_that_was_started_again() -> None:
    said: dict[str, Any] = {"epoch": 3, "taken": 40}
    member, life = MemberArrival(id="b/1", name="b"), Life(beat=7, says=said)
    lives = Lives(silence=5.0, ranks=[0])
    keys = lives.keys([member])
    assert keys == [life_key("b/1", 0)]
    lives.hear(keys, [json.dumps(asdict(life))])
    assert lives.is_alive(member)
    lives.hear(keys, [""])  # the store was away, and b has died meanwhile
    texts = Texts()
    lives.fill(texts)  # type: ignore[arg-type]
    assert Life(**json.loads(texts[keys[0]])) == lives.last_of(member) == life
    lives.hear(keys, [json.dumps(asdict(replace(life, waits=GONE)))])
    assert not lives.is_alive(member)


def test_who_could_give_no_sign_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is back holds what was said before it was away, until all have found it again."""
    now, member = 100.0, MemberArrival(id="b/1", name="b")
    monkeypatch.setattr("tacit.members.lives.time", SimpleNamespace(monotonic=lambda: now))
    lives = Lives(silence=5.0)
    said = lives.keys([member]), [json.dumps(asdict(Life(beat=7)))]
    assert lives.pause() == BEAT
    lives.hear(*said)
    assert lives.is_alive(member)
    assert lives.pause() == BEAT
    now = 104.875  # it will have been silent for too long before the next beat
    assert lives.pause() == 0.125
    now = 160.0  # it was away for a minute
    lives.hear(*said, since=now)
    assert lives.is_alive(member)
    now = 164.9
    assert lives.is_alive(member)
    now = 165.1
    assert not lives.is_alive(member)
    assert lives.pause() == BEAT


class Away:
    """A way to a store that is away."""

    name, start, longest_pause = "the store", "a command", 2.0

    def connected(self, seconds: float) -> Any:
        raise RuntimeError("nobody is there")


def test_patience_counts_from_the_beginning_of_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has trained on alone for so long does not wait as long once more."""
    now, pauses = 1000.0, list[float]()

    def pause(seconds: float) -> None:
        nonlocal now
        pauses.append(seconds)
        now += seconds

    clock = SimpleNamespace(monotonic=lambda: now, sleep=pause)
    monkeypatch.setattr("tacit.members.lives.time", clock)
    way: Any = Away()
    for away_since, waits in ((0.0, 60.0), (970.0, 30.0), (900.0, 0.0)):
        now = 1000.0
        pauses.clear()
        with pytest.raises(PeerLost, match="the store does not answer for 60 s"):
            StoreLink(way, 60.0, lambda since=away_since: since).store(lambda store: store.check([]))
        assert waits <= sum(pauses) <= waits + (2.0 if waits else 0.0)


def test_where_a_connection_has_ended_a_new_one_tells_whether_the_store_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hub that was started again is not said to be away."""
    answers: list[Any] = [RuntimeError("the hub is gone"), 7]

    def call(_: object) -> int:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return int(answer)

    way: Any = SimpleNamespace(name="the hub", longest_pause=0.0, connected=lambda seconds: object())
    link = StoreLink(way, 60.0)
    link.store(lambda store: store)
    assert link.store(call) == 7
    assert not caplog.messages
    link.close()
