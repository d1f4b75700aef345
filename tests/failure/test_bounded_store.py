"""Every call to a store ends."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tacit.errors import PeerLost
from tacit.failure import detector
from tacit.failure.barrier import StepsReached
from tacit.failure.bounded_store import BoundedStore, Unreachable
from tacit.failure.detector import FailureDetector, Member, RankProgress


class CutOff:
    """A store that answers until the link is cut, and then does not return."""

    def __init__(self) -> None:
        self.linked = threading.Event()
        self.linked.set()
        self.kept: dict[str, str] = {}

    def get(self, key: str) -> bytes:
        self.linked.wait()
        return self.kept[key].encode()

    def set(self, key: str, value: str) -> None:
        self.linked.wait()
        self.kept[key] = value

    def add(self, key: str, amount: int) -> int:
        self.linked.wait()
        self.kept[key] = str(int(self.kept.get(key, "0")) + amount)
        return int(self.kept[key])

    def check(self, keys: list[str]) -> bool:
        self.linked.wait()
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.linked.wait()
        return self.kept.setdefault(key, value).encode()


@pytest.fixture
def store() -> Iterator[CutOff]:
    made = CutOff()
    yield made
    made.linked.set()


def test_it_answers_as_the_store_does() -> None:
    real = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=1))
    bounded = BoundedStore(real, 5)
    bounded.set("a", "1")
    assert bounded.get("a") == b"1"
    assert bounded.add("n", 2) == 2
    assert (bounded.check(["a"]), bounded.check(["b"])) == (True, False)
    assert bounded.compare_set("c", "", "first") == b"first"
    assert bounded.compare_set("c", "", "second") == b"first"
    for text in "xy":
        bounded.append("t", text)
    assert bounded.texts(["t", "none", "a"]) == ["xy", "", "1"]
    with pytest.raises(dist.DistStoreError):
        bounded.get("absent")
    bounded.close()
    with pytest.raises(Unreachable):
        bounded.get("a")


@pytest.mark.parametrize("call", ["get", "set", "add", "check", "compare_set"])
def test_no_call_waits_for_ever(store: CutOff, call: str) -> None:
    bounded = BoundedStore(store, 60).within(0.1)
    arguments = {"get": ("a",), "set": ("a", "1"), "add": ("n", 1), "check": (["a"],)}
    store.linked.clear()
    began = time.monotonic()
    with pytest.raises(Unreachable, match=r"the launcher's store cannot be reached: no answer within 0\.1 s"):
        getattr(bounded, call)(*arguments.get(call, ("a", "", "1")))
    assert time.monotonic() - began < 5
    assert isinstance(Unreachable("x"), dist.DistError)


def test_who_asks_behind_a_call_without_answer_waits_as_long_as_he_said(store: CutOff) -> None:
    bounded = BoundedStore(store, 60)
    store.linked.clear()
    watching = ThreadPoolExecutor(1).submit(bounded.check, ["news"])
    time.sleep(0.05)
    began = time.monotonic()
    with pytest.raises(Unreachable):
        bounded.within(0.2).set("alarm", "1")
    with pytest.raises(Unreachable):
        bounded.set("alarm", "1")  # at once, as it is known by now
    assert time.monotonic() - began < 10
    store.linked.set()
    assert watching.result(timeout=5) is False


@pytest.fixture
def call(store: CutOff, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailureDetector]:
    monkeypatch.setattr(detector, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(detector, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(detector, "PrefixStore", lambda prefix, inner: inner)
    made = FailureDetector(
        store,  # type: ignore[arg-type]
        "key",
        Member(1, [0, 1]),
        RankProgress(lambda: 3, lambda: StepsReached(3)),
        lambda error: None,
        1.0,
    )
    yield made
    store.linked.set()
    made.close()


def test_a_rank_that_is_cut_off_says_so_soon_after_its_round_has_failed(
    call: FailureDetector, store: CutOff
) -> None:
    store.linked.clear()
    time.sleep(0.1)  # the watch asks now, and waits
    began = time.monotonic()
    found = call.alarm("Timed out waiting 8000ms")
    assert time.monotonic() - began < 5, "and not 8 s"
    assert isinstance(found, PeerLost)
    assert str(found) == (
        "the launcher's store cannot be reached: no answer within 0.3 s: this rank is cut off from the node "
        "that holds it, or that node is (Timed out waiting 8000ms)"
    )


def test_one_that_closes_is_not_left_waiting(call: FailureDetector, store: CutOff) -> None:
    store.linked.clear()
    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"cannot be reached: no answer within 1\.3 s"):
        call.enter_barrier()
    assert time.monotonic() - began < 30


def test_a_short_cut_costs_nothing(call: FailureDetector, store: CutOff) -> None:
    store.linked.clear()
    time.sleep(0.7)
    store.linked.set()
    time.sleep(1.5)
    assert call._found is None
    assert call._thread.is_alive()
