"""Ranks that average in pairs, at times of their own: nothing is lost or counted twice, and nobody waits."""

import logging
import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pairs_in_threads import KNOWN_AS, N, PairedCrew, train
from torch import Tensor, nn

from cases import for_each
from tacit.algorithms import parse
from tacit.attaching import requirements
from tacit.attaching.requirements import needs_servers
from tacit.compressors import BF16, TopK
from tacit.contracts import PairTopology, PayloadSpec, PushPull
from tacit.errors import AttachError, ConfigError, NonFinite, PeerLost, RoundError, UnevenData
from tacit.failure import barrier
from tacit.fsdp.model import far_level
from tacit.levels.spec import AttachSpec
from tacit.merges import Average, ServerParams
from tacit.overlap import Delayed
from tacit.planning.cluster_prediction import refuse
from tacit.rounds import AdaComm, Cycling
from tacit.stores.pairs import PairTransport, links, members
from tacit.strategy import Levels, Strategy
from tacit.topologies import Groups, Pairs
from tacit.transports.loopback import Loopback, LoopbackTransport

GRAPHS = ("complete", "ring", "exponential", "butterfly")


# ---- who asks whom ------------------------------------------------------------------------------------


@for_each("graph", GRAPHS)
def test_who_asks_is_never_asked_and_all_are_connected(graph: str) -> None:
    for peers in (1, 2, 3, 4, 5, 6, 8, 10, 16, 33):
        topology = Pairs(graph)  # type: ignore[arg-type]
        if (graph != "complete" and peers in (3, 5, 33)) or (graph == "butterfly" and peers in (6, 10)):
            with pytest.raises(ConfigError, match=rf"{peers} ranks is not possible.*rite graph='?complete"):
                topology.partners(0, peers)
            continue
        asks = {rank: topology.partners(rank, peers) for rank in range(peers)}
        asked = {other for others in asks.values() for other in others}
        assert not asked & {rank for rank, others in asks.items() if others}
        reached, new = {0}, [0]
        while new:
            here = new.pop()
            near = {other for other in range(peers) if other in asks[here] or here in asks[other]} - reached
            reached |= near
            new += near
        assert len(reached) == peers
        if graph == "ring" and peers > 2:
            assert all(len(others) in (0, 2) for others in asks.values())


def test_each_partner_is_drawn_about_as_often_and_no_lost_one() -> None:
    for graph in GRAPHS:
        for turn in range(20):
            askers = (0, 3, 5, 6) if graph == "butterfly" else (0, 2, 4, 6)
            asked = [Pairs(graph).partner(rank, 8, turn, seed=1) for rank in askers]  # type: ignore[arg-type]
            assert len({*asked} - {None}) == 4, "in one round no two ask the same"
    topology = Pairs()
    drawn = [topology.partner(2, 8, turn, seed=3) for turn in range(400)]
    assert {rank: 60 < drawn.count(rank) < 140 for rank in (1, 3, 5, 7)} == dict.fromkeys((1, 3, 5, 7), True)
    assert drawn == [topology.partner(2, 8, turn, seed=3) for turn in range(400)]
    assert {topology.partner(2, 8, turn, 3, {1, 7}) for turn in range(99)} == {3, 5}
    assert topology.partner(2, 4, 0, 0, {1, 3}) is None
    assert topology.partner(1, 4, 0, 0) is None


# ---- random schedules ---------------------------------------------------------------------------------


class Alone:
    """A member of nothing: no schedule here meets."""

    def lose(self, rank: int, why: str) -> PeerLost:
        raise AssertionError(why)

    def meet(self, what: str) -> list[int]:
        raise AssertionError(what)

    def close(self) -> None: ...


class Simulated:
    """Ranks whose messages arrive when a schedule says so, all in one thread.

    Attributes:
        x: the paper's lines, in plain tensors: a step is added, and two ranks become their mean at once.
    """

    def __init__(self, peers: int, topology: Pairs, seed: int) -> None:
        self.random, self.peers = random.Random(seed), peers
        net = Loopback(peers)
        self.ranks = [
            PairTransport(LoopbackTransport(net, rank), topology, Alone(), lambda ranks, xs: None, seed)
            for rank in range(peers)
        ]
        self.messages: list[Callable[[], None]] = []
        self.on_the_way = 0.0
        self.x = [float(rank) for rank in range(peers)]
        for rank, transport in enumerate(self.ranks):
            transport.enter("w", torch.tensor([self.x[rank]], dtype=torch.float64))
            for other in topology.partners(rank, peers):
                transport.connect(SimulatedLink(self, rank, other))
        self.left = [3] * peers
        self.waits: list[object | None] = [None] * peers

    def step(self, rank: int) -> None:
        self.left[rank] -= 1
        by = self.random.gauss(0, 1)
        self.x[rank] += by
        delta, whole = torch.tensor([by], dtype=torch.float64), PayloadSpec(None, 1, torch.float64)
        self.waits[rank] = self.ranks[rank].post(PushPull(((delta,),), (whole,), (whole,)), 0, "w")

    def ready(self, rank: int) -> bool:
        waits = self.waits[rank]
        return waits is None or waits.done.is_set()  # type: ignore[attr-defined]

    def stored(self, rank: int) -> float:
        return float(self.ranks[rank].store.read("w", torch.empty(1, dtype=torch.float64)))

    def run(self) -> None:
        while True:
            events: list[Callable[[], None]] = [
                lambda rank=rank: self.step(rank)  # type: ignore[misc]
                for rank in range(self.peers)
                if self.left[rank] and self.ready(rank)
            ]
            events += [lambda i=i: self.messages.pop(i)() for i in range(len(self.messages))]  # type: ignore[misc]
            if not events:
                break
            self.random.choice(events)()
            total = sum(map(self.stored, range(self.peers)))
            assert total - self.on_the_way == pytest.approx(sum(self.x), abs=1e-9)
        assert self.left == [0] * self.peers, "a deadlock"
        assert all(self.ready(rank) for rank in range(self.peers)), "somebody waits for ever"


class SimulatedLink:
    """A message there, and one back, each when the schedule says so."""

    def __init__(self, net: Simulated, rank: int, other: int) -> None:
        self.net, self.asks, self.rank = net, rank, other

    def ask(self, number: int, x: Tensor, reply: Callable[[Tensor | None], None]) -> None:
        net = self.net

        def there() -> None:
            moved = net.ranks[self.rank].answer(number, x, torch.empty_like(x))
            net.on_the_way += float(moved)
            mean = (net.x[self.asks] + net.x[self.rank]) / 2
            net.x[self.asks] = net.x[self.rank] = mean

            def back() -> None:
                net.on_the_way -= float(moved)
                reply(moved)

            net.messages.append(back)

        net.messages.append(there)

    def close(self, settled: bool, why: str = "") -> None: ...


def test_a_thousand_random_schedules_do_the_papers_lines_and_none_of_them_ends_in_a_deadlock() -> None:
    """Each exchange keeps the sum at every moment, and is a mean at one moment, whatever is in between."""
    for seed in range(1000):
        peers = 2 + seed % 4
        net = Simulated(peers, Pairs("complete" if peers % 2 else GRAPHS[seed % 3]), seed)  # type: ignore[arg-type]
        net.run()
        for rank in range(peers):
            assert net.stored(rank) == pytest.approx(net.x[rank], abs=1e-9), (seed, rank)


def test_groups_that_wait_for_nobody_do_their_lines_in_any_schedule_too() -> None:
    for seed in range(300):
        peers = (4, 8)[seed % 2]
        net = Simulated(peers, Pairs("butterfly", group_size=(2, 4)[seed // 2 % 2]), seed)
        net.run()
        for rank in range(peers):
            assert net.stored(rank) == pytest.approx(net.x[rank], abs=1e-9), (seed, rank)


def test_ranks_in_step_take_the_means_of_the_groups_of_wagma() -> None:
    """Round by round: all step, and messages of the first turn come before those of the second."""
    for group_size in (2, 4):
        net = Simulated(8, Pairs("butterfly", group_size=group_size), seed=0)
        groups = Groups(group_size)
        want = torch.tensor(net.x, dtype=torch.float64)
        for round_index in range(3):
            before = [*net.x]
            for rank in range(8):
                net.step(rank)
            want += torch.tensor(net.x, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
            while net.messages:
                messages, net.messages = net.messages, []
                for deliver in messages:
                    deliver()
            want = torch.tensor(groups.rows(8, round_index), dtype=torch.float64) @ want
            assert [net.stored(rank) for rank in range(8)] == pytest.approx(want.tolist(), abs=1e-12)


# ---- threads and sockets ------------------------------------------------------------------------------


def texts() -> Iterator[tuple[str, int]]:
    yield "adpsgd", 4
    yield "adpsgd:late=1", 5
    yield "adpsgd:sync_every=3,graph=ring", 4
    yield "adpsgd:graph=exponential,late=1,sync_every=2", 6
    yield "wagma:wait=false,global_every=5", 4
    yield "wagma:wait=false,group_size=4,global_every=4,late=1", 8


@for_each(("text", "peers"), [*texts()])
def test_in_many_threads_nothing_is_lost_and_nothing_counted_twice(text: str, peers: int) -> None:
    """In chunks of three entries, so that several of a bucket are under way."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "CHUNK", 3)
        trained_in_threads(text, peers)


def trained_in_threads(text: str, peers: int) -> None:
    crew = PairedCrew(text, peers=peers, sleeps=7)
    crew.each(lambda rank, _: train(crew, rank, 12))
    crew.each(lambda _, replica: replica.session.flush())
    total = sum(crew.stored(rank).double() for rank in range(peers))
    assert torch.allclose(total, peers * torch.ones(N) + sum(crew.pushed), atol=1e-4)
    crew.sync()
    flats = [replica.flat for replica in crew.replicas]
    assert all(torch.equal(flats[0], each) for each in flats)
    assert torch.allclose(crew.flat(0).double(), 1 + sum(crew.pushed) / peers, atol=1e-5)
    crew.each(lambda rank, _: train(crew, rank, 3))  # and on from there
    crew.sync()
    crew.close()


@for_each("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_sums_are_kept_in_other_types_too(dtype: torch.dtype) -> None:
    crew = PairedCrew("adpsgd", peers=4, dtype=dtype)
    crew.each(lambda rank, _: train(crew, rank, 10))
    total = sum(crew.stored(rank).double() for rank in range(4))
    assert torch.allclose(total, 4 * torch.ones(N) + sum(crew.pushed), atol=1e-5)
    crew.close()


def test_replicas_come_closer_than_without_averaging() -> None:
    def spread(crew: PairedCrew) -> float:
        x = torch.stack([crew.flat(rank) for rank in range(4)])
        return float((x - x.mean(0)).square().sum())

    mixed, apart = PairedCrew("adpsgd", peers=4), PairedCrew("adpsgd:sync_every=100", peers=4)
    together = threading.Barrier(4)  # a thread that is far ahead of the others would meet stale replicas
    for crew in (mixed, apart):
        crew.each(lambda rank, _, crew=crew: train(crew, rank, 20, lambda step: together.wait(30)))  # type: ignore[misc, arg-type, return-value]
    assert spread(mixed) < 0.5 * spread(apart)
    for crew in (mixed, apart):
        crew.close()


@for_each("slow", [0, 1])
@for_each("text", ["adpsgd", "wagma:wait=false,group_size=4,global_every=100"])
def test_a_slow_rank_slows_nobody(text: str, slow: int) -> None:
    """The others take all their steps while it is in the middle of its first, whether it asks or answers."""
    crew = PairedCrew(text, peers=4)
    finished = threading.Semaphore(0)
    few = 2 if text == "adpsgd" else 25  # where all are averaged at times, they must take equally many

    def work(rank: int, _: object) -> None:
        if rank == slow:
            train(crew, rank, few, lambda step: [finished.acquire(timeout=30) for _ in range(3) if not step])  # type: ignore[arg-type, return-value]
            return
        train(crew, rank, 25)
        assert crew.replicas[slow].session.step == 0
        finished.release()

    crew.each(work)
    crew.sync()
    assert [replica.session.step for replica in crew.replicas] == [few if r == slow else 25 for r in range(4)]
    crew.close()


@for_each("text", ["adpsgd", "wagma:wait=false,global_every=2"])
def test_one_rank_alone_trains_as_it_is(text: str) -> None:
    crew = PairedCrew(text, peers=1)
    train(crew, 0, 3)
    crew.sync()
    assert torch.equal(crew.flat(0), crew.stored(0))
    crew.close()


def test_all_are_equal_behind_a_round_in_which_all_are_averaged() -> None:
    """And nothing of anybody's steps is lost in it, or counted twice."""
    crew = PairedCrew("wagma:wait=false,global_every=4", peers=4, sleeps=3)
    for rounds in (4, 8):
        crew.each(lambda rank, _: train(crew, rank, 4))
        flats = [replica.flat for replica in crew.replicas]
        assert all(torch.equal(flats[0], each) for each in flats), rounds
        assert torch.allclose(crew.flat(0).double(), 1 + sum(crew.pushed) / 4, atol=1e-5)
    crew.each(lambda rank, _: train(crew, rank, 1))
    assert not torch.equal(crew.replicas[0].flat, crew.replicas[3].flat)
    crew.close()


@for_each("steps", [(5, 1), (3, 1), (4, 3)])  # a sync has a round of its own
def test_where_ranks_come_to_other_meetings_or_after_other_steps_all_are_told(steps: tuple[int, int]) -> None:
    crew = PairedCrew("wagma:wait=false,global_every=5", peers=2)
    said: dict[int, str] = {}

    def work(rank: int, replica: object) -> None:
        try:
            train(crew, rank, steps[rank])
            replica.progress.sync()  # type: ignore[attr-defined]
        except UnevenData as error:
            said[rank] = str(error)
            crew.links[rank].abort(error)  # and the other is not to be told that this one is gone

    crew.each(work)
    one = "session.sync() or its end after 3 steps" if steps[0] == 3 else "its round 5"
    other = f"session.sync() or its end after {steps[1]} steps"
    assert all("give all of them equally many batches" in said[rank] for rank in range(2))
    assert f"rank 10 has come to {one}, and rank 11 to {other}" in said[0]
    assert f"rank 11 has come to {other}, and rank 10 to {one}" in said[1]
    crew.close()


# ---- who is gone --------------------------------------------------------------------------------------


@for_each("lost", [0, 1])
def test_a_dead_rank_is_named(lost: int) -> None:
    crew = PairedCrew("adpsgd", peers=4)
    crew.each(lambda rank, _: train(crew, rank, 3))
    crew.kill(lost)
    errors: list[int] = []

    def work(rank: int, _: object) -> None:
        if rank != lost:
            with pytest.raises(PeerLost, match=f"rank {KNOWN_AS + lost} is gone: .*allow_lost=true"):
                train(crew, rank, 100_000)
            errors.append(rank)

    crew.each(work)
    assert len(errors) == 3
    for transport in crew.links:
        transport.abort()
    crew.close()


@for_each("lost", [0, 1])
@for_each("text", ["adpsgd:allow_lost=true", "wagma:wait=false,allow_lost=true,group_size=4,global_every=7"])
def test_a_dead_rank_is_left_out_where_that_is_allowed(
    text: str, lost: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tacit")
    crew = PairedCrew(text, peers=4)
    crew.each(lambda rank, _: train(crew, rank, 3))
    crew.kill(lost)
    others = [rank for rank in range(4) if rank != lost]
    crew.each(lambda rank, _: train(crew, rank, 30) if rank != lost else None)
    crew.each(lambda rank, replica: replica.progress.sync() if rank != lost else None)
    flats = [crew.replicas[rank].flat for rank in others]
    assert all(torch.equal(flats[0], each) for each in flats)
    crew.each(lambda rank, _: train(crew, rank, 5) if rank != lost else None)
    assert all(crew.replicas[rank].session.step == 38 for rank in others)
    said = [record.getMessage() for record in caplog.records]
    assert any(f"goes on without rank {KNOWN_AS + lost}, which is gone" in each for each in said)
    with pytest.raises(PeerLost, match=f"took this rank, {KNOWN_AS + lost}, for gone"):
        crew.links[lost]._members.meet("session.sync() or its end")
    crew.close()


def test_a_rank_that_does_not_come_to_a_meeting_is_missed_when_nothing_is_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(barrier, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(members, "POLL_SECONDS", 0.1)
    for allowed in (True, False):
        crew = PairedCrew(f"adpsgd:allow_lost={str(allowed).lower()}", peers=3)
        crew.members[2]._closing.set()  # frozen: its sockets are open, and it says nothing
        outcomes: list[object] = [None] * 3

        def work(rank: int, replica: object, outcomes: list[object] = outcomes) -> None:
            if rank < 2:
                try:
                    replica.progress.after_step()  # type: ignore[attr-defined]
                    replica.progress.sync()  # type: ignore[attr-defined]
                except RoundError as error:
                    outcomes[rank] = error

        crew.each(work)
        if allowed:
            assert outcomes == [None] * 3
        else:
            assert all("rank 12 is gone: nothing was heard of it" in str(each) for each in outcomes[:2])
        for transport in crew.links:
            transport.abort()
        crew.close()


def test_who_does_not_answer_is_named_within_the_time_out() -> None:
    crew = PairedCrew("adpsgd", peers=2, timeout=1.0)
    frozen = crew.links[1].store.held()
    with frozen, pytest.raises(PeerLost, match="rank 11 is gone: it did not answer within 1 s"):
        train(crew, 0, 5)
    for transport in crew.links:
        transport.abort()
    crew.close()


def test_who_closes_early_is_gone_to_the_others() -> None:
    crew = PairedCrew("adpsgd", peers=2)
    crew.each(lambda rank, _: train(crew, rank, 2))
    crew.links[1].close()
    with pytest.raises(PeerLost, match="rank 11 is gone"):
        train(crew, 0, 1000)
    crew.close()


def test_a_nan_stays_where_it_is() -> None:
    crew = PairedCrew("adpsgd", peers=4)
    crew.each(lambda rank, _: train(crew, rank, 2))
    crew.replicas[2].named["b"][1] = float("nan")
    with pytest.raises(NonFinite, match="b on rank 2"):
        crew.replicas[2].progress.after_step()
    assert all(bool(crew.stored(rank).isfinite().all()) for rank in range(4))
    crew.links[2].abort(crew.replicas[2].session.failure.error)
    with pytest.raises(PeerLost, match="rank 12 is gone: NaN or infinity in the parameter b on rank 2"):
        train(crew, 1, 100_000)
    crew.close()


# ---- checkpoints --------------------------------------------------------------------------------------


@for_each("text", ["adpsgd", "adpsgd:late=1", "adpsgd:sync_every=2", "wagma:wait=false,global_every=5"])
def test_a_run_goes_on_from_a_checkpoint(text: str) -> None:
    first = PairedCrew(text, peers=4)
    first.each(lambda rank, _: train(first, rank, 7))
    first.sync()
    saved = first.save()
    at = first.replicas[0].flat
    second = PairedCrew(text, peers=4, start=0.0)

    def load(rank: int, replica: object) -> None:
        replica.load(saved[rank])  # type: ignore[attr-defined]
        replica.progress.enter(second.links[rank].enter)  # type: ignore[attr-defined]

    second.each(load)
    assert all(torch.equal(replica.flat, at) for replica in second.replicas)
    assert all(replica.session.step == 7 for replica in second.replicas)
    begun = torch.stack([second.stored(rank) for rank in range(4)]).double()
    assert torch.equal(begun[0], begun[3])
    second.each(lambda rank, _: train(second, rank, 6))
    second.each(lambda _, replica: replica.session.flush())
    total = sum(second.stored(rank).double() for rank in range(4))
    assert torch.allclose(total, begun.sum(0) + sum(second.pushed), atol=1e-4)
    for each in (first, second):
        each.close()


# ---- what cannot be -----------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    def strategy(**more: object) -> Strategy:
        return Strategy(**{"subject": "delta", "topology": Pairs(), "merge": ServerParams(), **more})  # type: ignore[arg-type]

    assert isinstance(strategy(overlap=Delayed(1)).topology, PairTopology)
    for given, says in (
        ({"subject": "gradient", "merge": None}, "write subject='delta'"),
        ({"merge": Average()}, r"write merge=ServerParams\(whole=True\)"),
        ({"compressor": TopK()}, r"write compressor=Dense\(\)"),
        ({"compressor": BF16()}, r"write compressor=Dense\(\)"),
        ({"rounds": Cycling()}, r"write Every\(1\)"),
        ({"rounds": AdaComm(8)}, r"write Every\(1\)"),
        ({"buffers": "local"}, "leave it out"),
        ({"momentum": "averaged"}, "leave it out"),
    ):
        given = {key: value for key, value in given.items() if value is not None}
        if given.get("subject") == "gradient":
            given["merge"] = Strategy().merge
        with pytest.raises(ConfigError, match=says):
            strategy(**given)
    with pytest.raises(ConfigError, match="cannot be one of several levels"):
        Levels((Strategy(), strategy()))
    for text, says in (
        ("graph=star", "adpsgd:graph 'star'"),
        ("late=-1", "late=-1"),
        ("allow_lost=2", "allow_lost"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse(f"adpsgd:{text}")
    for text, says in (
        ("wait=false,group_size=3", "write 2 or 4"),
        ("wait=false,buffers=local", "buffers are averaged with the parameters"),
        ("allow_lost=true", "write wait=false too"),
        ("wait=2", "wait"),
        ("global_every=0,wait=false", "global_every=0"),
    ):
        with pytest.raises(ConfigError, match=says):
            parse(f"wagma:{text}")
    with pytest.raises(ConfigError, match=r"group_size=4 with graph='ring'.*write graph='butterfly'"):
        Pairs("ring", group_size=4)
    with pytest.raises(ConfigError, match="group_size=8 with 4 ranks is not possible: write 4"):
        Pairs("butterfly", group_size=8).partners(0, 4)


def test_other_doors_refuse_it_by_name() -> None:
    strategy = parse("adpsgd")
    with pytest.raises(ConfigError, match="who averages with whom, and when, is left to chance"):
        refuse(strategy)
    with pytest.raises(AttachError, match="averages whole parameters of two ranks"):
        far_level(strategy, 4)
    assert not needs_servers(strategy)


def test_models_for_which_ranks_wait_in_each_pass_are_refused() -> None:
    """DDP has SyncBatchNorm on a GPU alone, so this is no model of DDP's."""

    class Model:
        module = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
        find_unused_parameters = False
        parameters = module.parameters
        process_group = None

    strategy = parse("adpsgd")
    model: Any = Model()
    (why,) = requirements.pairs(AttachSpec(model=model, optimizers=[], strategy=strategy))
    assert re.search(r"1 is a SyncBatchNorm.*attach 'gossip'", why)
    assert not [*requirements.pairs(AttachSpec(model=model, optimizers=[], strategy=parse("gossip")))]
    for text in ("adpsgd:graph=ring", "adpsgd:graph=exponential", "wagma:wait=false"):
        (level,) = parse(text).levels
        assert isinstance(level.topology, PairTopology)
        with pytest.raises(ConfigError, match=r"rite graph='?complete"):
            level.topology.partners(0, 5)
