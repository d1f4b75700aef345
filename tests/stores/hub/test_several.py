"""Several hubs that share out what members exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shared_secret import SECRET
from torch import Tensor

from in_threads import in_threads
from tacit.contracts import AllGather, AllReduce, AllToAll, Permute
from tacit.errors import AttachError, ConfigError
from tacit.stores.hub.hub import Hub
from tacit.stores.hub.several import HubLinks, HubsWay, way_by
from tacit.transports.relayed_group import Homes, RelayedGroup

RANKS = 2


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hub]]:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    made = [Hub(("127.0.0.1", 0), SECRET, (1, 8), clip=10.0) for _ in range(2)]
    yield made
    for hub in made:
        hub.close()


def text(*hubs: Hub) -> str:
    return "+".join(f"127.0.0.1:{hub.port}" for hub in hubs)


def links(*hubs: Hub) -> HubLinks:
    return HubsWay(text(*hubs)).connected(5.0, "a")


class Counted:
    """A connection to two hubs that notes what goes to which of them."""

    hubs = 2

    def __init__(self) -> None:
        self.to = list[tuple[str, int]]()

    def share(self, group: str, about: dict[str, Any], body: Any, done: Any, hub: int) -> None:
        self.to.append((about.get("bucket", ""), hub))


def test_buckets_are_shared_out_by_size_and_all_stages_of_one_go_by_one_hub() -> None:
    relay: Any = Counted()
    first, second = (RelayedGroup(relay, f"g #{i}", 0, RANKS) for i in (1, 2))
    homes: Homes = {}
    sizes = {"large": 100, "a": 30, "b": 40, "c": 20, "d": 20}
    for bucket, size in sizes.items():
        x = torch.zeros(size)
        first.says(AllToAll(((x,), (x,))), bucket, 0, homes)
        first.all_to_all_single(x, torch.cat([x, x]), [], [])
    for bucket in reversed(sizes):  # answers come in any order
        second.says(AllGather((torch.zeros(1),)), bucket, 1, homes)
        second.all_gather_single(torch.zeros(2), torch.zeros(1))
    expected = {"large": 0, "a": 1, "b": 1, "c": 1, "d": 1}
    assert relay.to[:5] == [*expected.items()]
    assert sorted(relay.to[5:]) == sorted(expected.items())


def test_what_ranks_send_each_other_goes_by_one_hub_for_both() -> None:
    relay: Any = Counted()
    one, other = (RelayedGroup(relay, "g", rank, RANKS) for rank in range(RANKS))
    for tag in range(8):
        one.says(Permute((torch.zeros(1),), (1, None)), "b", 0, {})
        one.send([torch.zeros(1)], 1, tag)
        other.recv([torch.zeros(1)], 0, tag)
    to = [hub for _, hub in relay.to]
    assert to[::2] == to[1::2]
    assert {*to} == {0, 1}


def test_a_round_by_two_hubs_has_the_numbers_of_one(hubs: list[Hub]) -> None:
    def round_(rank: int) -> list[Tensor]:
        connected = links(*hubs)
        group, homes = RelayedGroup(connected, "g #1", rank, RANKS), Homes()
        found = [torch.arange(5.0) * (rank + 1) + i for i in range(4)]
        for i, x in enumerate(found):
            group.says(AllReduce((x,)), f"bucket {i}", 0, homes)
            group.allreduce([x]).wait()
        assert {hub for hub, _ in homes.values()} == {0, 1}
        connected.close()
        return found

    for found in in_threads(RANKS, round_, seconds=60):
        assert all(torch.equal(x, torch.arange(5.0) * 3 + 2 * i) for i, x in enumerate(found))


def test_while_one_is_away_all_are(hubs: list[Hub]) -> None:
    first, second = hubs
    way = HubsWay(text(first, second))
    there = way.connected(5.0)
    there.set("a", "1")
    group, homes = RelayedGroup(there, "g", 0, 2), Homes()
    x = torch.ones(3)
    for bucket in ("by the first", "by the second"):
        group.says(AllReduce((x,)), bucket, 0, homes)
        waiting = group.allreduce([x])
    second.close()
    with pytest.raises(RuntimeError, match=f"the hub at 127.0.0.1:{second.port} is gone"):
        waiting.wait()
    with pytest.raises(RuntimeError, match=f"the hub at 127.0.0.1:{second.port} is gone"):
        there.set("a", "2")
    with pytest.raises(RuntimeError):
        way.connected(0.1)
    hubs[1] = Hub(("127.0.0.1", second.port), SECRET, (1, 8))
    again = way.connected(5.0)
    assert again.get("a") == b"1"
    first.close()
    with pytest.raises(RuntimeError, match=f"the hub at 127.0.0.1:{first.port} is gone"):
        RelayedGroup(again, "h", 0, 2).barrier().wait()


def test_all_have_the_same_hubs_in_the_same_order(hubs: list[Hub]) -> None:
    first, second = hubs
    links(first, second).close()
    with pytest.raises(
        AttachError, match=f"{second.port} is hub 2 of 2 to other members, and 1 of 2 to this"
    ):
        links(second, first)
    with pytest.raises(AttachError, match=f"{first.port} is hub 1 of 2 to other members, and 1 of 1 to"):
        way_by(text(first)).connected(5.0)
    links(first, second).close()


@pytest.mark.parametrize(
    ("given", "wrong"),
    [("a:1+", "a hub is missing"), ("a:1+b", "'b' is no address"), ("a:1+a:1", "has a hub twice")],
)
def test_hubs_that_cannot_be(given: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    with pytest.raises(ConfigError, match=wrong):
        way_by(given)
