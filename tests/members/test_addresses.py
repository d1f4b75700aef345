"""What members need to know before they connect travels in one text of each."""

import threading

import pytest

from in_threads import in_threads
from tacit.transports.member_links import _Addresses


class Texts:
    """Where members leave texts; it keeps what was asked for."""

    def __init__(self) -> None:
        self.written: dict[str, str] = {}
        self.asked: list[list[str]] = []

    def write(self, key: str, text: str) -> None:
        self.written[key] = text

    def texts(self, keys: list[str]) -> list[str]:
        self.asked.append(keys)
        return [self.written.get(key, "") for key in keys]


def test_the_addresses_of_all_groups_travel_in_one_text_of_each_rank() -> None:
    board, found = Texts(), dict[str, bytes]()
    each = [_Addresses(board, "a", 2, rank, 2, lambda: False) for rank in range(2)]

    def connect(i: int) -> None:  # as Gloo does, for a group with checks and one of two connections
        rank, group = i % 2, "ab"[i // 2]
        each[rank].set(f"{group}//cpu//0/{rank}", f"{group}{rank}".encode())
        found[f"{group}{rank}"] = each[rank].get(f"{group}//cpu//0/{1 - rank}")
        if group == "b":
            each[rank].set(f"b//cpu//1/{rank}", b"second")
            assert each[rank].get(f"b//cpu//1/{1 - rank}") == b"second"
        else:
            each[rank].set(f"a//cpu//PG_WRAPPER/a//0/{rank}", b"checks")
            assert each[rank].get(f"a//cpu//PG_WRAPPER/a//0/{1 - rank}") == b"checks"

    in_threads(4, connect, seconds=30)
    assert found == {"a0": b"a1", "a1": b"a0", "b0": b"b1", "b1": b"b0"}
    alone = {f"a {key}/{rank}" for key in ("b//cpu//1", "a//cpu//PG_WRAPPER/a//0") for rank in range(2)}
    assert {*board.written} == {"a/0", "a/1"} | alone
    assert ["a/0", "a/1"] in board.asked


def test_who_waits_for_an_address_is_told_that_it_does_not_come() -> None:
    over = threading.Event()
    mine = _Addresses(Texts(), "a", 1, 0, 2, over.is_set)
    mine.set("a//cpu//0/0", b"here")
    over.set()
    with pytest.raises(RuntimeError, match="a member is gone that was to connect"):
        mine.get("a//cpu//0/1")
