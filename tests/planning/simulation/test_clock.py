"""The clock: links and cores are shared as they are, and hops add up."""

import math

import pytest
from made_training import network

from tacit.contracts import NET, NODE, WORLD
from tacit.planning.simulation.clock import Activity, Clock, Transfer
from tacit.transports.message_layout import AT_ONCE, IN_ROUNDS

FREE = {"delay": 0.0, "cpu": 0.0}


def ended(clock: Clock, *activities: Activity) -> list[float]:
    """When each is over."""
    found: dict[int, float] = {}
    for i, each in enumerate(activities):
        each.then(lambda i=i: found.setdefault(i, clock.now))  # type: ignore[misc]

    def all_of_them():  # type: ignore[no-untyped-def]
        yield from activities

    clock.run(all_of_them())
    return [found[i] for i in range(len(activities))]


def test_work_takes_its_time_on_a_core_of_its_own() -> None:
    clock = Clock(cores=2.0)
    assert ended(clock, clock.work(3.0), clock.work(1.0)) == [3.0, 1.0]


def test_work_on_too_few_cores_is_shared_equally() -> None:
    clock = Clock(cores=1.0)
    assert ended(clock, clock.work(3.0), clock.work(1.0)) == pytest.approx([4.0, 2.0])


def test_nobody_is_given_more_than_it_can_use() -> None:
    clock = Clock(cores=1.0)
    transfer = Transfer(NET, 100.0, 10.0, delay=0.0, cpu=2.5)  # a quarter of a core, for ten seconds
    assert ended(clock, clock.send(transfer), clock.work(9.0)) == pytest.approx([10.0, 11.5])


def test_threads_of_one_work_take_several_cores() -> None:
    clock = Clock(cores=4.0)
    assert ended(clock, clock.work(8.0, threads=4)) == pytest.approx([2.0])


def test_transfers_share_a_link_and_not_two() -> None:
    clock = Clock(cores=1.0)
    one, other = (Transfer(NET, nbytes, 10.0, **FREE) for nbytes in (100.0, 50.0))
    near = Transfer(NODE, 100.0, 10.0, **FREE)
    found = ended(clock, clock.send(one), clock.send(other), clock.send(near))
    assert found == pytest.approx([15.0, 10.0, 10.0])


def test_a_transfer_waits_for_its_latency_first() -> None:
    clock = Clock(cores=1.0)
    assert ended(clock, clock.send(Transfer(NET, 100.0, 10.0, delay=2.0, cpu=0.0))) == pytest.approx([12.0])


def test_a_slow_processor_slows_the_link() -> None:
    clock = Clock(cores=8.0)
    found = ended(clock, clock.send(Transfer(NET, 100.0, 10.0, delay=0.0, cpu=40.0)))
    assert found == pytest.approx([40.0]), "one thread sends, whatever the cores"


def test_resting_takes_no_core() -> None:
    clock = Clock(cores=1.0)
    assert ended(clock, clock.rest(5.0), clock.work(5.0)) == pytest.approx([5.0, 5.0])


@pytest.mark.parametrize(
    ("kind", "sent", "hops", "messages"),
    [
        ("AllReduce", 100, 14, 14),
        ("AllGather", 7 * AT_ONCE, 1, 1),
        ("AllGather", 7 * AT_ONCE + 7, 1, 7),
        ("AllToAll", 7 * IN_ROUNDS, 1, 1),
        ("AllToAll", 7 * IN_ROUNDS + 7, 1, 7),
        ("ReduceScatter", 7 * IN_ROUNDS + 7, 1, 7),
        ("Broadcast", 100, 3, 3),
        ("Permute", 100, 1, 1),
    ],
)
def test_hops_of_a_collective(kind: str, sent: int, hops: int, messages: int) -> None:
    found = network(8, 1, rate=math.inf, latency=0.25, per_hop=0.5).transfer(kind, WORLD, sent, 60)
    assert (found.delay, found.cpu, found.nbytes, found.link) == (0.5 * hops, 0.5 * messages, 60.0, NET)


def test_the_way_of_one_half_of_an_all_reduce_is_hidden_behind_the_other() -> None:
    ring = network(4, 1, rate=10.0, latency=0.25)
    assert ring.transfer("AllReduce", WORLD, 60, 20).delay == 2 * 6 * 0.25 - 1.0
    assert ring.transfer("AllReduce", WORLD, 60, 60).delay == 0.0
    assert ring.transfer("AllGather", WORLD, 60, 60).delay == 2 * 0.25


def test_several_connections_carry_sums_alone() -> None:
    net = network(4, 1, rate=10.0, connections=3.0)
    assert [net.transfer(kind, WORLD, 60, 60).rate for kind in ("AllReduce", "AllGather")] == [30.0, 10.0]
    assert network(1, 4, near_rate=10.0, connections=3.0).transfer("AllReduce", WORLD, 60, 0).rate == 10.0


@pytest.mark.parametrize(
    ("size", "silence", "lost"),
    [
        (64 << 10, 0.0, 0.0),
        (64 << 10, 0.26, 0.0),
        (64, math.inf, 0.0),
        (64 << 10, 0.27, 52.1),  # half goes at once, in a round trip that could carry 250 kB
        (64 << 10, 0.53, 56.1 + 52.1),  # a quarter, a half
        (64 << 10, math.inf, 56.5 + 53.1),  # 14 kB, 29 kB
        (256 << 10, 0.27, 30.0),
        (16 << 20, math.inf, 56.5 + 53.1 + 46.1 + 32.2 + 4.4),  # until the link is full
    ],
)
def test_after_silence_a_connection_sends_twice_as_many_bytes_in_each_round_trip(
    size: int, silence: float, lost: float
) -> None:
    """Measured all-to-alls of 64 KiB after 0.46, 0.75 and 1.1 s lost 79, 136 and 136 ms at 30 ms one way."""
    net = network(4, 1, rate=12.5e6, latency=0.03)
    plain = net.transfer("AllToAll", WORLD, 3 * size, 3 * size)
    found = net.resumed("AllToAll", WORLD, plain, 3 * size, silence)
    assert 1e3 * (found.delay - plain.delay) == pytest.approx(lost, abs=0.2)
    slow = network(4, 1, rate=1e3, latency=0.03)
    plain = slow.transfer("AllToAll", WORLD, 3 * size, 3 * size)
    assert slow.resumed("AllToAll", WORLD, plain, 3 * size, silence) == plain, "which few bytes fill"


def test_ranks_gather_in_a_ring_where_nodes_have_several() -> None:
    many = network(4, 2, latency=0.25)
    assert many.transfer("AllGather", WORLD, 100, 60).delay == 0.5 * 7
    assert many.transfer("AllGather", NET, 100, 60).delay == 0.5


def test_what_stays_in_the_node_takes_no_link_between_nodes() -> None:
    found = network(4, 2, rate=5.0).transfer("AllReduce", NODE, 100, 0)
    assert found.link == NODE
    assert math.isinf(found.rate)
