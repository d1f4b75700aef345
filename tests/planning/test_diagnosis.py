"""Steps taken apart by hand-made measurements, and each known cause by what tells it."""

from dataclasses import replace

import pytest

from tacit.errors import ConfigError
from tacit.links import Links
from tacit.planning.culprits import diagnosed
from tacit.planning.diagnosis import PARTS, Diagnosis, Facts, Finding, RankSteps, shares
from tacit.planning.profile import GpuLinks, GpuProfile

STEPS = 10


def of_rank(rank: int, own: float = 0.1, waits: float = 0.02, **more: object) -> RankSteps:
    """A rank that works so long a step, and waits so long."""
    made = RankSteps(
        rank=rank,
        node=rank,
        host=f"host{rank}",
        machine=f"machine{rank}",
        wall=(own + waits,) * STEPS,
        data=(0.001,) * STEPS,
        exposed=(waits,) * STEPS,
        parts={"loading": 0.0, "data": 0.001, "forward": own / 3, "backward": own / 2, "optimizer": 0.0},
        threads=1,
        cores=4,
        sent=1e6,
        interface="eth0",
    )
    return replace(made, **more)  # type: ignore[arg-type]


def facts(*ranks: RankSteps, **more: object) -> Facts:
    made = Facts("ddp", 1, ranks or tuple(of_rank(rank) for rank in range(4)))
    return replace(made, **more)  # type: ignore[arg-type]


def links(slow: float = 1e9, several: float = 1e9, latency: float = 1e-3, inside: float = 1e10) -> Links:
    """Four nodes of two ranks; those from and to node 3 carry `slow`."""

    def matrix(far: float, of_three: float) -> tuple[tuple[float | None, ...], ...]:
        return tuple(
            tuple(inside if i == j else of_three if 3 in (i, j) else far for j in range(4)) for i in range(4)
        )

    return Links(
        hosts=tuple(f"host{i}" for i in range(4)),
        ranks=tuple((2 * i, 2 * i + 1) for i in range(4)),
        latency=matrix(latency, latency),
        rate=matrix(1e9, slow),
        rate_of_flows=matrix(several, min(several, slow)),
        rate_both_ways=matrix(1e9, slow),
        flows=4,
        backend="gloo",
        date="",
    )


def found(made: Facts) -> list[Finding]:
    return list(diagnosed(made).findings)


def kinds(made: Facts) -> list[str]:
    return [each.kind for each in found(made)]


# ---- the parts ----------------------------------------------------------------------------------------


def test_a_step_is_taken_apart_and_the_parts_are_the_step() -> None:
    made = facts(predicted=0.12, waits={"encoding": 0.01, "links": 0.03})
    taken = shares(made)
    assert [*taken.parts] == [*PARTS]
    assert sum(taken.parts.values()) == pytest.approx(made.seconds) == pytest.approx(0.12)
    assert taken.parts["encoding"] == pytest.approx(0.005), "a quarter of what is waited"
    assert taken.parts["links"] == pytest.approx(0.015)
    assert taken.parts["data"] == pytest.approx(0.001)
    assert taken.limit == pytest.approx(0.1)


def test_ranks_wait_for_the_slowest_and_the_rest_is_the_exchange() -> None:
    made = facts(of_rank(0, 0.1, 0.07), of_rank(1, 0.15, 0.02), of_rank(2, 0.1, 0.07), of_rank(3, 0.1, 0.07))
    taken = shares(made)
    assert taken.parts["slow rank"] == pytest.approx(3 / 4 * 0.05)
    assert taken.parts["links"] == pytest.approx(0.02)
    assert taken.limit == pytest.approx(0.15)


def test_replicas_that_move_on_wait_only_for_who_is_behind_over_a_period() -> None:
    """Two ranks in turn take longer; over two steps they are equal."""
    one = of_rank(0, wall=(0.1, 0.3) * 5, exposed=(0.0, 0.1) * 5)
    two = of_rank(1, wall=(0.2, 0.2) * 5, exposed=(0.0, 0.1) * 5)
    assert shares(facts(one, two)).parts["slow rank"] > 0
    taken = shares(facts(one, two, period=2))
    assert taken.parts["slow rank"] == pytest.approx(0)
    assert taken.parts["links"] == pytest.approx(0.05)
    odd = facts(
        *(replace(each, wall=(9.0, *each.wall), data=(0.0, *each.data)) for each in (one, two)), period=2
    )
    odd = replace(odd, ranks=tuple(replace(each, exposed=(0.0, *each.exposed)) for each in odd.ranks))
    assert odd.seconds == pytest.approx(0.2), "a step before the first whole period does not count"
    assert sum(shares(odd).parts.values()) == pytest.approx(odd.seconds)


# ---- the causes ---------------------------------------------------------------------------------------


def test_where_nothing_is_wrong_nothing_is_found() -> None:
    assert kinds(facts(links=links(), predicted=0.12)) == []
    assert "Nothing stands out." in str(diagnosed(facts()))


def test_a_slow_rank_is_named_and_what_is_slow_about_it() -> None:
    slow = of_rank(2, 0.2, 0.0)
    made = facts(of_rank(0, 0.1, 0.1), of_rank(1, 0.1, 0.1), slow, of_rank(3, 0.1, 0.1))
    (first, *_) = found(made)
    assert first.kind == "slow rank"
    assert first.seconds == pytest.approx(0.1)
    assert "rank 2 (node 2, host2)" in first.says
    assert "backward" in first.says
    assert "mainly the backward pass, by 50.0 ms" in first.says
    preempted = replace(slow, parts={**of_rank(0).parts, "backward": 0.0505})
    (first, *_) = found(facts(of_rank(0, 0.1, 0.1), of_rank(1, 0.1, 0.1), preempted, of_rank(3, 0.1, 0.1)))
    assert (first.kind, first.seconds) == ("slow rank", pytest.approx(0.1))
    assert "mainly" not in first.says, "half a millisecond explains nothing"
    turns = of_rank(0, wall=(0.3, *[0.2] * 9), exposed=(0.0, *[0.1] * 9))
    (first, *_) = found(facts(turns, of_rank(1, wall=(0.3, *[0.2] * 9), exposed=(0.2, *[0.0] * 9))))
    assert first.seconds == pytest.approx(0.09), "the step in which the other was the slowest does not count"
    late = (of_rank(0, 0.1, 0.001), slow, of_rank(1, 0.1, 0.001))
    assert kinds(facts(*late)) == [], "nobody waits for it"
    starving = replace(slow, parts={**of_rank(0).parts, "loading": 0.1})
    (first, *_) = found(facts(of_rank(0, 0.1, 0.1), of_rank(1, 0.1, 0.1), starving, of_rank(3, 0.1, 0.1)))
    assert first.kind == "data loader"
    assert "rank 2 " in first.says


def test_on_a_gpu_the_host_the_products_and_the_exchange_are_looked_at() -> None:
    one, two, three, four = found(of_gpus(0.033, GPU, tf32_gain=0.5, channels_last_gain=0.3))
    assert (one.kind, one.seconds) == ("TF32", pytest.approx(0.5 * (0.1 / 3 + 0.1 / 2)))
    assert (two.kind, two.seconds) == ("channels last", pytest.approx(0.3 * (0.1 / 3 + 0.1 / 2)))
    assert "torch.channels_last" in two.advice
    assert (three.kind, three.seconds) == ("links", pytest.approx(0.02))
    assert (four.kind, four.seconds) == ("launches", 0.0)
    assert kinds(of_gpus(0.02, GPU, tf32_gain=0.01)) == ["links"]
    bound = of_gpus(0.033, GPU)
    for queued, costs in ((0.07, [0.1 / 3 + 0.1 / 2 - 0.07]), (0.0833, [])):
        ranks = tuple(replace(each, queued=queued) for each in bound.ranks)
        said = [each.seconds for each in found(replace(bound, ranks=ranks)) if each.kind == "launches"]
        assert said == [pytest.approx(each) for each in costs]


GPU = GpuProfile("a GPU", True, True, down=2e10, up=2e10, links=GpuLinks(1e9, 1e-5, 1e11, 1e-5))


def of_gpus(launching: float = 0.0, gpu: GpuProfile = GPU, **more: float) -> Facts:
    ranks = (of_rank(rank, 0.1, 0.02, gpu="a GPU", launching=launching) for rank in range(2))
    return facts(*ranks, gpu=replace(gpu, **more))


def test_a_starving_loader_of_a_gpu_is_to_pin_its_memory() -> None:
    made = facts(*(of_rank(r, parts={"loading": 0.05, "data": 0.001}) for r in range(2)), gpu=GPU)
    (one,) = [each for each in found(made) if each.kind == "data loader"]
    assert "pin_memory=True" in one.advice


def test_gpus_that_reach_each_other_by_pcie_cost_what_nvlink_would_save() -> None:
    predicted = {"predicted": 0.12, "changes": {"NVLink": 0.105}}
    slow = replace(GPU, links=replace(GPU.links, near_rate=1.5e10))
    (one,) = found(replace(of_gpus(gpu=slow), **predicted))
    assert (one.kind, one.seconds) == ("PCIe", pytest.approx(0.015))
    assert "15.0 GB/s, and the host with 20.0" in one.says
    assert found(replace(of_gpus(), **predicted)) == [], "it is NVLink by its rate"
    assert found(replace(of_gpus(gpu=slow), predicted=0.12, changes={"NVLink": 0.119})) == []


def test_one_socket_of_nccl_that_does_not_fill_the_link() -> None:
    made = replace(of_gpus(), links=links(several=3e9), predicted=0.12, changes={"NCCL's sockets": 0.105})
    slow = replace(made, gpu=replace(GPU, links=replace(GPU.links, rate=1e8)))
    (one,) = found(slow)
    assert (one.kind, one.seconds) == ("NCCL's sockets", pytest.approx(0.015))
    assert "NCCL's ring carries 800 Mbit/s" in one.says
    assert "NCCL_SOCKET_NTHREADS=4" in one.advice
    assert found(replace(slow, sockets=4)) == [], "it has several already"
    assert found(made) == [], "it carries more than four streams of TCP: it does not go by sockets"


def test_interfaces_that_lie_idle_beside_a_busy_one() -> None:
    two = tuple(of_rank(rank, rate=1e10, idle=("eth1", "eth2")) for rank in range(2))
    made = facts(*two, predicted=0.12, changes={"all interfaces": 0.105})
    (one,) = found(made)
    assert (one.kind, one.seconds) == ("idle interfaces", pytest.approx(0.015))
    assert "GLOO_SOCKET_IFNAME=eth0,eth1,eth2" in one.advice
    (one,) = found(replace(made, gpu=GPU))
    assert "NCCL_SOCKET_IFNAME=eth0,eth1,eth2" in one.advice
    assert found(replace(made, ranks=(two[0], of_rank(1, rate=1e10)))) == [], "not on every node"


def test_small_buckets_of_a_gpu_are_those_below_100_mb() -> None:
    made = facts(predicted=0.12, changes={"large buckets": 0.1}, buckets=9, bucket_bytes=25 << 20)
    assert found(made) == []
    (one,) = found(replace(made, gpu=GPU))
    assert (one.kind, one.seconds) == ("small buckets", pytest.approx(0.02))
    assert "bucket_cap_mb=100" in one.advice


def test_ranks_that_are_slow_in_turn_are_no_slow_rank() -> None:
    turns = [of_rank(r, wall=tuple(0.3 if s % 4 == r else 0.1 for s in range(STEPS))) for r in range(4)]
    assert "slow rank" not in kinds(facts(*turns))


def test_a_loader_that_starves_and_work_between_steps() -> None:
    (one,) = found(facts(*(of_rank(r, parts={"loading": 0.05, "data": 0.001}) for r in range(2))))
    assert (one.kind, one.seconds) == ("data loader", pytest.approx(0.05))
    (one,) = found(facts(*(of_rank(r, parts={"loading": 0.0, "data": 0.03}) for r in range(2))))
    assert (one.kind, one.seconds) == ("data loader", pytest.approx(0.03))
    several = facts(*(of_rank(r, parts={"loading": 0.05, "data": 0.03}, passes=4) for r in range(2)))
    assert kinds(several) == [], "with accumulation the other passes are among it"
    assert "passes before the last, and data" in str(diagnosed(several))
    assert "data, and what else the script does" in str(diagnosed(facts()))


def test_a_slow_link_by_its_node() -> None:
    made = facts(links=links(slow=1e8), predicted=0.12, changes={"even links": 0.105})
    (first, *_) = found(made)
    assert (first.kind, first.seconds) == ("slow link", pytest.approx(0.015))
    assert "node 3 (host3) carries 100 Mbit/s, and the others 1000 Mbit/s" in first.says
    unhurt = facts(links=links(slow=1e8), predicted=0.12, changes={"even links": 0.119})
    assert kinds(unhurt) == [], "a link that nobody waits for is none"


def test_threads_are_in_each_others_way_only_where_there_are_more_than_cores() -> None:
    many = [of_rank(r, threads=4, machine="one") for r in range(4)]
    (one,) = found(facts(*many, threads_gain=0.5))
    assert one.kind == "threads"
    assert "4 ranks compute with 4 threads each on 4 cores" in one.says
    assert "OMP_NUM_THREADS=1" in one.advice
    assert one.seconds == pytest.approx(0.5 * 0.099)
    assert kinds(facts(*(replace(each, machine=str(each.rank)) for each in many))) == []


def test_what_ddp_was_told() -> None:
    assert kinds(facts(searched=True)) == ["unused parameters"]
    assert kinds(facts(searched=True, unused=1)) == [], "it had reason to look"
    (one,) = found(facts(copying=0.002))
    assert (one.kind, one.seconds) == ("bucket views", 0.002)
    small = facts(predicted=0.12, bucket_bytes=1000, buckets=99, changes={"large buckets": 0.06})
    assert kinds(small) == ["small buckets"]
    assert kinds(replace(small, bucket_bytes=25 << 20)) == []
    assert kinds(replace(small, changes={"large buckets": 0.119})) == ["small buckets"], "99 are too many"
    assert kinds(replace(small, changes={"large buckets": 0.119}, buckets=2)) == []


@pytest.mark.parametrize(("smaller", "found"), [(0.115, ["large buckets"]), (0.119, [])])
def test_buckets_that_leave_late_are_named_where_smaller_ones_save_something(
    smaller: float, found: list[str]
) -> None:
    made = facts(predicted=0.12, bucket_bytes=25 << 20, buckets=3, changes={"smaller buckets": smaller})
    assert kinds(made) == found


def test_a_flat_ring_only_where_nodes_are_faster_inside() -> None:
    made = facts(links=links(), predicted=0.12, changes={"by node": 0.09})
    assert kinds(made) == ["flat ring"]
    assert kinds(replace(made, links=links(inside=1e9))) == []


def test_an_interface_that_is_not_the_fastest() -> None:
    made = [of_rank(r, rate=1e9, faster="ib0", faster_rate=1e11) for r in range(4)]
    (one,) = found(facts(*made))
    assert one.kind == "slow interface"
    assert "GLOO_SOCKET_IFNAME=ib0" in one.advice


def test_links_that_one_stream_does_not_fill() -> None:
    made = facts(links=links(several=4e9), predicted=0.12, changes={"several streams": 0.105})
    (one,) = found(made)
    assert one.kind == "connections"
    assert one.seconds == pytest.approx(0.015)
    assert "from node 2 to node 1 one stream carries 1000 Mbit/s, and 4 together 4000 Mbit/s" in one.says
    assert "TACIT_CONNECTIONS=4" in one.advice
    assert "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0" in one.advice
    assert "bucket_cap_mb=4" in one.advice
    assert kinds(replace(made, links=links(several=1.2e9))) == []
    assert kinds(replace(made, changes={"several streams": 0.119})) == [], "it would save next to nothing"
    assert kinds(replace(made, connections=4)) == []
    assert kinds(replace(made, predicted=None, changes={})) == ["connections"], "nobody knows what it saves"


def test_packets_that_are_lost() -> None:
    ranks = [of_rank(r, resent=1e-2 * (r == 2), congestion_control="cubic") for r in range(4)]
    (one,) = found(facts(*ranks))
    assert one.kind == "lost packets"
    assert "node 2 (host2) sent 1 % of its segments again" in one.says
    assert "TCP slows down for each by cubic" in one.says
    assert "tcp_congestion_control=bbr" in one.advice
    assert kinds(facts(*(replace(each, congestion_control="bbr") for each in ranks))) == []
    assert kinds(facts(*(replace(each, resent=1e-4) for each in ranks))) == []
    waiting = (of_rank(r, own=0.02, waits=0.18, congestion_control="bbr", resent=1e-2) for r in range(8))
    assert kinds(facts(*waiting)) == [], "BBR is right there, though it pauses"


def test_a_congestion_control_that_pauses() -> None:
    made = facts(*(of_rank(r, own=0.02, waits=0.18, congestion_control="bbr") for r in range(8)))
    (one,) = found(made)
    assert one.kind == "congestion control"
    assert one.seconds == pytest.approx(0.048 * 0.18)
    assert "on 8 nodes" in one.says
    assert "cubic on all nodes" in one.advice
    assert kinds(facts(*(replace(each, congestion_control="cubic") for each in made.ranks))) == []
    assert kinds(facts(*(of_rank(r, congestion_control="bbr") for r in range(8)))) == [], "links cost little"
    assert kinds(facts(*made.ranks[:4])) == [], "so few nodes seldom wait for a pause"


def test_another_strategy_where_the_exchange_costs_most() -> None:
    made = facts(predicted=0.12, waits={"links": 0.02, "encoding": 0.0}, best="topk:ratio=0.01")
    made = replace(made, changes={"strategy": 0.102})
    (one,) = found(made)
    assert one.kind == "links"
    assert '"topk:ratio=0.01"' in one.advice
    (one,) = found(replace(made, waits={"links": 0.0, "encoding": 0.02}))
    assert one.kind == "encoding"


def test_no_strategy_saves_more_than_is_waited() -> None:
    loose = (of_rank(0, 0.1, 0.01), of_rank(1, 0.115, 0.03))  # the first does not wait for the second
    made = diagnosed(facts(*loose, predicted=0.12, changes={"strategy": 0.01}, best="topk"))
    waited = made.parts["links"] + made.parts["encoding"]
    (one,) = [each for each in made.findings if each.kind == "links"]
    assert one.seconds == pytest.approx(waited)
    assert made.limit == pytest.approx(made.seconds - waited), "what the prediction is bounded by"
    assert f"predicted to take {1e3 * made.limit:.1f} ms" in one.says


def test_the_costliest_comes_first() -> None:
    made = facts(searched=True, copying=0.01, predicted=0.12, bucket_bytes=9, changes={"large buckets": 0.06})
    assert kinds(made) == ["small buckets", "bucket views", "unused parameters"]


# ---- as text ------------------------------------------------------------------------------------------


def test_a_diagnosis_is_saved_and_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = diagnosed(facts(links=links(slow=1e8), copying=0.01), ["the weather"])
    made.save(tmp_path / "one.json")
    assert Diagnosis.from_json((tmp_path / "one.json").read_text()) == made
    assert "Not measured: the weather." in str(made)
    assert "1.00 MB a step by eth0" in made.traffic
    with pytest.raises(ConfigError, match="holds no diagnosis"):
        Diagnosis.from_json("{}")


@pytest.mark.parametrize(
    ("best", "advice"),
    [
        ("onebit-adam:beta=0.9", '"onebit-adam:beta=0.9,freeze_step=N"), where N is a fifth'),
        ("zeroone-adam", '"zeroone-adam:freeze_step=N"), where N is 3 / (1 - beta2)'),
        ("lowbit", '"lowbit"). What it costs in accuracy: tacit list lowbit'),
    ],
)
def test_the_advice_has_what_must_be_set(best: str, advice: str) -> None:
    (one,) = found(facts(predicted=0.12, changes={"strategy": 0.06}, best=best))
    assert advice in one.advice
