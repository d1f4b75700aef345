"""Replicas that reach each other by a hub alone, as processes: they join, die, and outlive the hub."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from members_processes import Members, begun, one_dies_and_another_comes, wait_for
from shared_secret import SECRET

from tacit.stores.hub.hub import Hub
from tacit.stores.tls import TlsServer, fingerprints
from tacit_lab.certificates import make


class Hubs:
    """Two hubs in this process, which can be ended and started again at their ports."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "hub.pem", folder / "hub.key"
        make(["127.0.0.1"], 30, *self._files)
        self.known = fingerprints(self._files[0])[0]
        self.all = [self._started(0) for _ in range(2)]

    def _started(self, port: int) -> Hub:
        return Hub(("127.0.0.1", port), SECRET, (1, 8), TlsServer(*self._files), clip=50.0)

    def start(self, which: int = 0) -> None:
        self.all[which] = self._started(self.all[which].port)

    def end(self, which: int = 0) -> None:
        self.all[which].close()

    @property
    def where(self) -> str:
        return f"hub:127.0.0.1:{self.all[0].port}"

    @property
    def both(self) -> str:
        return f"{self.where}+127.0.0.1:{self.all[1].port}"


@pytest.fixture
def hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hubs]:
    made = Hubs(tmp_path)
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    monkeypatch.setenv("TACIT_TLS", made.known)
    yield made
    for each in made.all:
        each.close()


@pytest.fixture
def members(hubs: Hubs) -> Iterator[Members]:
    with begun(hubs.where) as all_:
        yield all_


@pytest.mark.parametrize("algorithm", ["lowbit:sync_every=2", "topk:ratio=0.1"])
def test_one_dies_and_another_comes(members: Members, algorithm: str) -> None:
    one_dies_and_another_comes(members, algorithm)


def test_the_hub_dies_and_members_train_on_until_it_is_back(members: Members, hubs: Hubs) -> None:
    trains_on(members, hubs, "lowbit:sync_every=2", 0)


def test_one_of_two_hubs_dies_and_members_train_on_until_it_is_back(hubs: Hubs) -> None:
    with begun(hubs.both) as members:
        trains_on(members, hubs, "diloco:sync_every=4", 1)


def trains_on(members: Members, hubs: Hubs, algorithm: str, dies: int) -> None:
    a, b = (members.member(name, algorithm, 300) for name in "ab")
    while len(a.until("step")["members"]) < 2:
        pass
    before = a.until("step", 20)["step"]
    for _ in wait_for("exchange by this hub"):
        if hubs.all[dies]._groups:
            break
    hubs.end(dies)
    a.until("step", before + 25)  # rounds are due every few steps, and it does not wait for them
    hubs.start(dies)
    came = members.member("c", algorithm, 300)
    assert came.until("begun")["begun"] > before
    ends = [each.ended() for each in (a, b, came)]
    assert ends[0]["sums"] == ends[1]["sums"] == ends[2]["sums"]
    assert all(each["end"]["members"] == 3 for each in ends)
    assert ends[0]["last"] < ends[0]["first"]
    said = a.error()
    assert "is away: a trains on without rounds" in said
    assert "a meets the others again, and has missed the rounds of" in said


def test_gradients_wait_for_the_hub(members: Members, hubs: Hubs) -> None:
    a, b = (members.member(name, "dense", 150) for name in "ab")
    while len(a.until("step")["members"]) < 2:
        pass
    a.until("step", 20)
    hubs.end()
    time.sleep(1.0)
    hubs.start()
    ends = [each.ended() for each in (a, b)]
    assert ends[0]["sums"] == ends[1]["sums"]
    assert all(each["end"]["members"] == 2 for each in ends)


def test_who_pushes_far_too_much_is_put_out_and_told(
    members: Members, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = (members.member(name, "lowbit:sync_every=2", 120) for name in "ab")
    c = members.member("c", "lowbit:sync_every=2", 120, "large")
    while len(c.until("step")["members"]) < 3:
        pass
    assert c.process.wait(60) == 1
    assert "PayloadError: the hub has put this member out: its share is" in c.error()
    ends = [each.ended() for each in (a, b)]
    assert ends[0]["sums"] == ends[1]["sums"]
    assert ends[0]["last"] < ends[0]["first"]
    (told,) = (each for each in caplog.messages if "is put out" in each)
    assert told.startswith("c (127.0.0.1:")
