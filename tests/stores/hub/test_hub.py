"""The hub of members: it keeps texts as a store does, carries out collectives, and tells who is gone."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_secret import SECRET
from torch import Tensor
from worker_threads import join

from in_process_command import called
from in_threads import in_threads
from tacit.errors import AttachError, ConfigError, PayloadError, ServerLost
from tacit.members.lives import StoreLink, life_key
from tacit.members.record import GONE, Life, MemberArrival, Period
from tacit.stores.hub.hub import CONNECTIONS, Hub
from tacit.stores.hub.link import HubLink, HubTies, HubWay
from tacit.stores.secret import Secret
from tacit.stores.server.__main__ import main
from tacit.stores.server.process import ServerProcess
from tacit.stores.tls import TlsServer, TlsWorker, fingerprints
from tacit.torch_compat import TCPStore
from tacit.transports.process_groups import member_group
from tacit.transports.relayed_group import RelayedGroup
from tacit_lab.certificates import make

SIZE = 3


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(("127.0.0.1", 0), SECRET, (1, 8))
    yield made
    made.close()


def linked(hub: Hub, secret: Secret = SECRET, tls: TlsWorker | None = None) -> HubLink:
    return HubLink(("127.0.0.1", hub.port), secret, tls, 10.0)


def grouped(hub: Hub, call: Callable[[RelayedGroup, int], Any], name: str = "g") -> list[Any]:
    """What the call returns on each rank of a group, each with a connection of its own."""
    links = [linked(hub) for _ in range(SIZE)]
    groups = [RelayedGroup(link, name, rank, SIZE) for rank, link in enumerate(links)]
    try:
        return in_threads(SIZE, lambda rank: call(groups[rank], rank), seconds=60)
    finally:
        for link in links:
            link.close()


def eventually(so: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not so() and time.monotonic() < until:
        time.sleep(0.01)
    return so()


def waited(work: dist.Work, *found: Tensor) -> Sequence[Tensor]:
    work.wait()
    return found


def test_texts_are_kept_as_by_torchs_store(hub: Hub) -> None:
    ours, theirs = linked(hub), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for store in (ours, theirs):
        store.set("a", "1")
    calls: list[Callable[[Any], Any]] = [
        lambda s: s.get("a"),
        lambda s: s.check(["a"]),
        lambda s: s.check(["a", "b"]),
        lambda s: s.add("n", 2),
        lambda s: s.add("n", 0),
        lambda s: s.compare_set("a", "1", "2"),
        lambda s: s.compare_set("a", "1", "3"),
        lambda s: s.compare_set("c", "", "4"),
        lambda s: s.compare_set("d", "5", "6"),
        lambda s: s.check(["d"]),
        lambda s: s.get("n"),
    ]
    for call in calls:
        assert call(ours) == call(theirs)
    with pytest.raises(RuntimeError, match="has no 'nothing'"):
        ours.get("nothing")
    assert linked(hub).get("a") == b"2"


def reduced(group: RelayedGroup, rank: int) -> Sequence[Tensor]:
    x = torch.tensor([1.0, 1e8, -3.0]) * (rank + 1)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.SUM
    most = torch.tensor([rank, 10 - rank], dtype=torch.uint8)
    largest = dist.AllreduceOptions()
    largest.reduceOp = dist.ReduceOp.MAX
    works = [group.allreduce([x], options), group.allreduce([most], largest)]
    return [*waited(works[0], x), *waited(works[1], most)]


def test_sums_have_the_same_bits_for_all(hub: Hub) -> None:
    for x, most in grouped(hub, reduced):
        assert torch.equal(x, torch.tensor([6.0, 6e8, -18.0]))
        assert most.tolist() == [2, 10]


def test_shares_are_put_together_in_the_order_of_ranks(hub: Hub) -> None:
    def gathered(group: RelayedGroup, rank: int) -> list[float]:
        outs = [torch.zeros(2) for _ in range(SIZE)]
        waited(group.allgather([outs], [torch.full((2,), float(rank))]))
        flat = torch.zeros(2 * SIZE)
        waited(group.all_gather_single(flat, torch.full((2,), float(rank))))
        assert torch.equal(flat, torch.cat(outs))
        return flat.tolist()

    assert grouped(hub, gathered) == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * SIZE


def test_each_rank_gets_its_part(hub: Hub) -> None:
    def exchanged(group: RelayedGroup, rank: int) -> list[int]:
        """Rank r sends d + 1 entries of 10 r + d to rank d."""
        mine = torch.cat([torch.full((d + 1,), 10 * rank + d) for d in range(SIZE)])
        out = torch.zeros(SIZE * (rank + 1), dtype=mine.dtype)
        waited(group.all_to_all_single(out, mine, [rank + 1] * SIZE, [1, 2, 3]))
        return out.tolist()

    assert grouped(hub, exchanged) == [[0, 10, 20], [1, 1, 11, 11, 21, 21], [2, 2, 2, 12, 12, 12, 22, 22, 22]]


def test_one_sends_to_all_and_to_one(hub: Hub) -> None:
    def sent(group: RelayedGroup, rank: int) -> list[float]:
        x, y = torch.full((3,), float(rank)), torch.zeros(2)
        options = dist.BroadcastOptions()
        options.rootRank = 1
        waited(group.broadcast([x], options))
        if rank == 0:
            waited(group.send([torch.ones(2)], 2, 7))
        elif rank == 2:
            waited(group.recv([y], 0, 7))
        return [*x.tolist(), *y.tolist()]

    assert grouped(hub, sent) == [[1.0] * 3 + [0.0] * 2, [1.0] * 3 + [0.0] * 2, [1.0] * 5]


def test_several_messages_are_under_way_to_one(hub: Hub) -> None:
    """A newcomer's state is sent so, whoever of both is first."""

    def sent(group: RelayedGroup, rank: int) -> list[float]:
        pieces = [torch.full((2,), float(i)) if rank == 0 else torch.zeros(2) for i in range(4)]
        if rank < 2:
            call = partial(group.send, to=1) if rank == 0 else partial(group.recv, source=0)
            for work in [call([each]) for each in pieces]:
                work.wait()
        return torch.cat(pieces).tolist()

    ours, theirs, _ = grouped(hub, sent)
    assert ours == theirs == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]


def test_who_waits_is_told_that_another_one_is_gone(hub: Hub) -> None:
    links = [linked(hub) for _ in range(2)]
    groups = [RelayedGroup(link, "g", rank, 2) for rank, link in enumerate(links)]
    both = [group.barrier() for group in groups]
    for work in both:
        work.wait()
    waiting = groups[0].barrier()
    links[1].close()
    with pytest.raises(RuntimeError, match="a member's connection has ended"):
        waiting.wait()
    with pytest.raises(RuntimeError, match="a member's connection has ended"):
        groups[0].barrier().wait()
    other = RelayedGroup(links[0], "another", 0, 2)
    waiting = other.barrier()
    other.abort()
    with pytest.raises(RuntimeError, match="the group was aborted"):
        waiting.wait()


def test_a_hub_that_ends_is_told_and_another_address_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    first, second = (Hub(("127.0.0.1", 0), SECRET, (1, 2)) for _ in range(2))
    way = HubWay(f"127.0.0.1:{first.port},127.0.0.1:{second.port}")
    link = way.connected(5.0)
    waiting = RelayedGroup(link, "g", 0, 2).barrier()
    first.close()
    with pytest.raises(RuntimeError, match=r"the hub at 127.0.0.1:\d+ is gone"):
        waiting.wait()
    with pytest.raises(RuntimeError, match="is gone"):
        link.set("a", "1")
    with pytest.raises(RuntimeError, match="cannot be reached"):
        way.connected(0.1)
    again = way.connected(5.0)
    again.set("a", "1")
    assert linked(second).get("a") == b"1"
    second.close()


def test_a_newcomer_goes_where_members_are(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = Hub(("127.0.0.1", 0), SECRET, (1, 8))
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    linked(other).set("period", "")
    where = f"127.0.0.1:{hub.port},127.0.0.1:{other.port}"
    assert HubWay(where).connected(5.0).check(["period"])
    assert "train without each other" not in caplog.text
    linked(hub).set("period", "")
    assert HubWay(where).connected(5.0).name.endswith(str(hub.port))
    assert (
        f"at 127.0.0.1:{hub.port} and at 127.0.0.1:{other.port}, and train without each other" in caplog.text
    )
    other.close()


def test_one_hub_by_two_addresses_is_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    linked(hub).set("period", "")
    assert HubWay(f"127.0.0.1:{hub.port},localhost:{hub.port}").connected(5.0).check(["period"])
    assert not caplog.messages


def test_a_name_of_two_machines_is_told(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    plain = socket.getaddrinfo

    def two(host: str, port: int, *given: Any, **more: Any) -> Any:
        (one,) = plain("127.0.0.1", port, type=socket.SOCK_STREAM)
        return [(*one[:4], (ip, port)) for ip in ("127.0.0.1", "127.0.0.2") if host == "hub.example.org"]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    HubWay(f"hub.example.org:{hub.port}").connected(5.0).close()
    assert "hub.example.org is the name of 2 machines, 127.0.0.1 and 127.0.0.2: members of" in caplog.text


def test_what_has_the_place_of_a_hub_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A member of which the hub has died waits for its own; a newcomer is told at once."""
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    first = Hub(("127.0.0.1", 0), SECRET, (1, 2))
    where = "127.0.0.1", first.port
    way = HubWay(f"127.0.0.1:{first.port}")
    way.connected(5.0).close()
    first.close()
    other = Hub(where, Secret(b"the secret of somebody else"), (1, 2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has another secret"):
            way.connected(1.0)
    (told,) = caplog.messages[-1:]
    assert told.startswith("a hub was there before, and is waited for: the hub at 127.0.0.1")
    assert caplog.text.count("is waited for") == 1
    with pytest.raises(AttachError, match="has another secret"):
        HubWay(f"127.0.0.1:{first.port}").connected(1.0)
    other.close()
    again = Hub(where, SECRET, (1, 2))
    assert way.connected(5.0).check(["limits"])
    again.close()


def test_a_parameter_server_is_no_hub_and_a_hub_none(hub: Hub) -> None:
    server = ServerProcess(1, 0, 0, secret=SECRET, host="127.0.0.1", timeout=5.0)
    serves = threading.Thread(target=server.run, daemon=True)
    serves.start()
    link = HubLink(("127.0.0.1", server.port), SECRET, None, 10.0)
    with pytest.raises(
        AttachError, match=r"is no hub\. It has answered: .* let TACIT_HUB name a hub, which is"
    ):
        link.check(["limits"])
    server.stop()
    serves.join(10)
    with pytest.raises(ServerLost, match="this is a hub of members: let TACIT_SERVERS name servers"):
        join(hub, 0, 1)


def test_who_is_connected(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    one, other = HubTies(lambda: linked(hub), "one/1a/0"), HubTies(lambda: linked(hub), "other/2b/0")
    watched = {"one/1a/0": ("hub", 1), "other/2b/0": ("hub", 1), "never there": ("hub", 1)}
    assert one.broken(watched) == []
    other.close()
    assert eventually(lambda: one.broken(watched) == ["other/2b/0"])
    assert hub.members == ["one/1a/0"]
    assert eventually(lambda: "other is gone" in caplog.messages)
    here = [each.partition(", from ")[0] for each in caplog.messages if "here" in each]
    assert here == ["one is here", "other is here"]


class SlowLink:
    """A connection to a hub that answers no question in time; `failure`: why it is gone."""

    failure: BaseException | None = None
    closed = False

    def ask(self, what: str, names: object) -> list[str]:
        if what == "gone" and names:
            raise RuntimeError("the hub has not answered within 2 s")
        return []

    def close(self) -> None:
        self.closed = True


def test_a_hub_that_is_slow_does_not_take_a_member_for_dead() -> None:
    """The end of its connection would say so to all others."""
    link: Any = SlowLink()
    ties = HubTies(lambda: link, "one")
    assert ties.broken({"other": ("hub", 1)}) == []
    assert not link.closed
    link.failure = RuntimeError("it is gone")
    assert ties.broken({"other": ("hub", 1)}) == []
    assert link.closed


def test_there_is_room_for_so_many(hub: Hub) -> None:
    hub._most = 2
    links = [linked(hub) for _ in range(3)]
    assert [link.check(["limits"]) for link in links[:2]] == [True, True]
    with pytest.raises(RuntimeError, match="is gone"):
        links[2].check(["limits"])


@pytest.mark.parametrize(
    ("about", "wrong"),
    [
        ({"do": "reduce", "dtype": "object"}, "reduced by sum as object"),
        ({"do": "steal"}, "do"),
        ({"rank": 7}, "rank 7"),
        ({"do": "exchange", "sizes": [1]}, "1 parts, for 2 ranks"),
        ({"size": -1}, "size"),
    ],
)
def test_what_no_member_sends_ends_its_connection_alone(
    about: dict[str, Any], wrong: str, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    link, other = linked(hub), linked(hub)
    found: list[Any] = []
    came = threading.Event()
    whole = {"do": "gather", "key": "0", "rank": 0, "size": 2} | about
    link.share("g", whole, [torch.zeros(4, dtype=torch.uint8)], lambda x: (found.append(x), came.set())[1])
    assert came.wait(10)
    assert wrong in str(found[0]), found
    assert eventually(lambda: "a member sent an invalid frame" in caplog.text)
    assert other.add("n", 1) == 1


def test_shares_that_do_not_fit_are_refused(hub: Hub) -> None:
    def other_shape(group: RelayedGroup, rank: int) -> str:
        with pytest.raises(PayloadError if rank == 2 else RuntimeError) as caught:
            group.allreduce([torch.ones(5 if rank == 2 else 4)]).wait()
        return str(caught.value)

    ours, others, theirs = grouped(hub, other_shape)
    assert ours == others
    why = "its share has 20 bytes, and the others' 16: does it train the same model?"
    assert f"was put out: {why}" in ours
    assert theirs == f"the hub has put this member out: {why}"


def test_strangers_are_kept_out_and_tls_is_spoken(tmp_path: Path) -> None:
    files = tmp_path / "hub.pem", tmp_path / "hub.key"
    make(["127.0.0.1"], 30, *files)
    hub = Hub(("127.0.0.1", 0), SECRET, (1, 2), TlsServer(*files))
    tls = TlsWorker(fingerprints(files[0])[0])
    with pytest.raises(AttachError, match="has another secret"):
        linked(hub, Secret(b"the secret of somebody else"), tls)
    link = linked(hub, tls=tls)
    big = torch.randn(1_000_000)
    out = torch.zeros(1_000_000)
    RelayedGroup(link, "g", 0, 1).all_gather_single(out, big).wait()
    assert torch.equal(out, big)
    hub.close()


def test_options_of_a_hub(capsys: pytest.CaptureFixture[str]) -> None:
    for words, wrong in (
        ([], "has either --workers, how many there are, or --min and --max"),
        (["--workers", "2", "--min", "1"], "has either --workers"),
        (["--min", "0"], "--min=0"),
        (["--min", "3", "--max", "2"], "--max=2"),
        (["--min", "1", "--clip", "1"], "--clip=1.0"),
        (["--workers", "2", "--clip", "9"], "--clip is for members"),
        (["--min", "1", "--checkpoint", "a.pt"], "are for --workers: members keep the state"),
    ):
        assert main(["--port", "0", *words]) == 2
        assert wrong in capsys.readouterr().err


def test_connections_are_ended_by_whoever_is_done_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    hub = Hub(("127.0.0.1", 0), SECRET, (1, 1))
    way = HubWay(f"127.0.0.1:{hub.port}")
    for _ in range(CONNECTIONS + 20):  # more than there is room for
        link = StoreLink(way, 5.0)
        assert link.store(lambda store: store.add("n", 0)) == 0
        link.close()
        meeting = way.meeting("period/1/0", "a", timedelta(seconds=5), lambda: True)
        with pytest.raises(RuntimeError):
            member_group(replace(meeting, make=failing), 0, 1, timedelta(seconds=5))
    hub.close()


def failing(*_: object) -> dist.ProcessGroup:
    raise RuntimeError("one did not come")


def test_tacit_serve_says_who_is_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_SERVER_SECRET", "a secret of the tests alone")
    monkeypatch.setenv("TACIT_HUB", f"127.0.0.1:{hub.port}")
    assert f"at 127.0.0.1:{hub.port}: period 0, 0 members (min 1, max 8)" in called("serve", "--status").out
    link = linked(hub)
    there = [MemberArrival("1", "here", step=7), MemberArrival("2", "off", step=8), MemberArrival("3", "new")]
    link.set("period", Period(4, there).to_text())
    link.set(life_key("1", 0), json.dumps(asdict(Life(step=12, unsent=2, extra=7))))
    link.set(life_key("2", 0), json.dumps(asdict(Life(step=9, waits=GONE))))
    done = called("serve", "--status")
    assert done.code == 0
    assert "period 4, 3 members" in done.out
    assert "here: step 12, 7 more beyond its periods, 2 since its last round" in done.out
    assert "off: step 9, gone" in done.out
    link.ask("here", "5/0")
    other = linked(hub)
    other.ask("here", "6/0")
    for each in (MemberArrival("5", "new"), MemberArrival("6", "gone again")):
        link.append("arrived/5", json.dumps(asdict(each)) + "\n")
    other.close()
    assert eventually(lambda: hub.members == ["5/0"])
    said = called("serve", "--status").out
    assert "new waits for period 5" in said
    assert "gone again" not in said
    monkeypatch.setenv("TACIT_HUB", f"127.0.0.1:{hub.port}+localhost:{hub.port}")
    assert f"the hub at localhost:{hub.port}: hub 2 of 2" in called("serve", "--status").out
    assert not link.check(["place"]), "whoever looks on is no member"
    hub.close()
    monkeypatch.setattr("tacit_lab.cli.serve._SECONDS", 0.2)
    done = called("serve", "--status")
    assert done.code == 1
    assert "cannot be asked" in done.err
    assert called("serve", "--min", "3", "--max", "2").code == 2


def test_a_way_needs_a_secret_and_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TACIT_SERVER_SECRET", raising=False)
    with pytest.raises(ConfigError, match="'hub' is no address of a server"):
        HubWay("hub")
    with pytest.raises(AttachError, match="no secret"):
        HubWay("hub:1")
