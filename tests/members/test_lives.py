"""What members know of each other by their signs of life, with a store that is a dict."""

import json
from dataclasses import asdict
from typing import Any

from tacit.members.lives import Lives, StoreLink, life_key
from tacit.members.record import Life, MemberArrival


class Texts(dict[str, str]):
    """A store."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        assert expected == ""
        return self.setdefault(key, value).encode()


class Link(StoreLink):
    """What asks it."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def life(self, id: str, rank: int) -> Life | None:
        text = self.texts.get(life_key(id, rank))
        return None if text is None else Life(**json.loads(text))


def test_the_last_words_of_the_dead_come_into_a_store_that_was_started_again() -> None:
    said: dict[str, Any] = {"epoch": 3, "taken": 40}
    texts, member = Texts(), MemberArrival(id="b/1", name="b")
    texts[life_key("b/1", 0)] = json.dumps(asdict(Life(beat=7, says=said)))
    link = Link(texts)
    lives = Lives(link, silence=5.0, ranks=[0])
    assert lives.is_alive(member)
    link.texts = Texts()  # the store was away, and b has died meanwhile
    lives.is_alive(member)
    lives.fill(link.texts)  # type: ignore[arg-type]
    found = link.life("b/1", 0)
    assert found is not None
    assert found.says == said
    assert lives.last_of(member) == found
