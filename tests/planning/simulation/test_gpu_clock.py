"""Steps of a rank with a GPU, simulated: every expected time can be added up by hand.

A step of the made training: 1 ms of data, 4 forward, 10 backward, 2 the optimizer. Buckets of 78,000 and of
24,832 bytes are ready 4 and 8 ms after the forward pass. Among four ranks an all-reduce sends 1.5 times that.
"""

import math
from dataclasses import replace

import made_training as made
import pytest

from tacit.algorithms import parse
from tacit.contracts import NET, NODE, WORLD
from tacit.planning.cluster_prediction import Prediction, computing, predict
from tacit.planning.profile import GpuLinks, GpuProfile, Launching, Profile
from tacit.planning.simulation.clock import Network
from tacit.planning.simulation.networks import between_gpus

FREE = Launching()
BUSY = Launching(forward=0.008, backward=0.020, optimizer=0.002)


def profile(launching: Launching = FREE, in_stream: bool = True, **more: float) -> Profile:
    copies = {"down": 1e15, "up": 1e15, **more}
    return replace(made.profile(), gpu=GpuProfile("made", True, in_stream, **copies, launching=launching))


def network(rate: float = math.inf, near: float = math.inf, nodes: int = 4, ranks: int = 1) -> Network:
    """Links of GPUs; Gloo's are without limit."""
    return replace(made.network(nodes, ranks, math.inf), gpu=GpuLinks(rate, 0.0, near, 0.0))


def predicted(text: str, of: Profile, on: Network, each: float = 0.0, launching: float = 0.0) -> Prediction:
    told = made.with_cost(of, text, on.nodes, on.ranks, each)
    (cost,) = told.costs
    levels = tuple(
        replace(level, buckets=tuple(replace(b, launching=launching) for b in level.buckets))
        for level in cost.levels
    )
    return predict(parse(text), told.with_costs([replace(cost, levels=levels)]), on)


@pytest.mark.parametrize("text", ["ddp", "dense"])
def test_what_is_sent_early_enough_is_hidden(text: str) -> None:
    found = predicted(text, profile(), network(117e6))
    assert found.seconds == pytest.approx(0.017)
    assert found.far == pytest.approx(0.0)
    assert computing(profile(), network()) == pytest.approx(0.017)


@pytest.mark.parametrize("text", ["ddp", "dense"])
def test_a_slow_link_is_waited_for_in_the_order_of_launches(text: str) -> None:
    found = predicted(text, profile(), network(11.7e6))
    # The first bucket leaves at 9 ms and takes 10, the second one 37,248 / 11.7e6 s more.
    assert found.seconds == pytest.approx(0.021 + 37_248 / 11.7e6)
    assert found.far == pytest.approx(0.004 + 37_248 / 11.7e6)


def test_inside_a_node_the_gpus_own_links_count() -> None:
    slow = predicted("ddp", profile(), network(1.0, near=11.7e6, nodes=1, ranks=4))
    assert slow.seconds == pytest.approx(0.021 + 37_248 / 11.7e6)
    assert slow.near > 0
    assert slow.far == 0


def test_kernels_of_an_exchange_share_the_gpu_with_backward() -> None:
    """Two buckets, each encoded and decoded in 1 ms: the GPU works for 4 ms more, and never rests."""
    assert predicted("topk", profile(), network(), each=0.001).seconds == pytest.approx(0.021)


def test_what_is_bound_by_launches_takes_the_hosts_time() -> None:
    assert computing(profile(BUSY), network()) == pytest.approx(0.031)
    assert predicted("ddp", profile(BUSY), network()).seconds == pytest.approx(0.031, rel=0.02)
    more = predicted("dense", profile(BUSY), network(), launching=0.001)
    less = predicted("dense", profile(BUSY), network())
    assert more.seconds - less.seconds == pytest.approx(0.002)


def test_launching_an_exchange_is_hidden_behind_a_busy_gpu() -> None:
    assert predicted("dense", profile(), network(117e6), launching=0.001).seconds == pytest.approx(0.017)


def test_on_the_host_buckets_are_copied_there_and_back() -> None:
    # Down from 9 ms on, and from 13; up from 10 on, without a pause.
    found = predicted("topk", profile(in_stream=False, down=78e6, up=7.8e6), network())
    assert found.seconds == pytest.approx(0.012 + 102_832 / 7.8e6)


def test_rounds_of_deltas_are_rare() -> None:
    every, seldom = (
        predicted(f"localsgd:sync_every={count}", profile(), network(11.7e6)).seconds for count in (1, 10)
    )
    assert every > seldom > 0.017


def test_averages_late_by_a_step_hide_behind_it() -> None:
    assert predicted("pipesgd", profile(), network(117e6)).seconds == pytest.approx(0.017)
    # The second bucket ends at 19 ms and a bit, and the next backward begins at 22.
    assert predicted("pipesgd", profile(), network(11.7e6)).seconds == pytest.approx(
        0.017 + (0.019 + 37_248 / 11.7e6 - 0.022)
    )


def test_chains_of_nccl() -> None:
    on = replace(network(100.0, near=1000.0, nodes=4, ranks=8), gpu=GpuLinks(100.0, 0.5, 1000.0, 0.25))
    far = on.transfer("AllReduce", WORLD, 1000, 1000, by_nccl=True)
    assert (far.link, far.nbytes, far.rate, far.cpu) == (NET, 1000.0, 100.0, 0.0)
    assert far.delay == 4 * 0.5, "a tree over four nodes, up and down"
    near = on.transfer("AllGather", NODE, 700, 0, by_nccl=True)
    assert (near.link, near.nbytes, near.rate, near.delay) == (NODE, 700.0, 1000.0, 7 * 0.25)
    assert on.transfer("AllToAll", NET, 700, 100, by_nccl=True).delay == 0.5


def test_gpus_of_another_cluster_reach_other_nodes_as_it_does() -> None:
    on, of = made.network(rate=100.0, latency=0.5), profile(down=30.0, up=20.0)
    assert between_gpus(on, made.profile()) == on
    assert between_gpus(on, of).gpu == GpuLinks(100.0, 0.5, 10.0, 0.0), "not measured: through the host"
    assert of.gpu is not None
    measured = replace(of, gpu=replace(of.gpu, links=GpuLinks(1.0, 1.0, 40.0, 0.1)))
    assert between_gpus(on, measured).gpu == GpuLinks(100.0, 0.5, 40.0, 0.1)
