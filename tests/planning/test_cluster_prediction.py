"""Predictions that can be computed by hand, and what always holds of them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import made_training as made
import pytest

from tacit.algorithms import parse
from tacit.contracts import WORLD
from tacit.errors import ConfigError
from tacit.links import Links, Matrix
from tacit.planning.cluster_prediction import Prediction, predict
from tacit.planning.simulation import networks
from tacit.planning.simulation.timeline import ENCODING, MAIN, WAITING
from tacit.transports.probing import RingCost
from tacit_lab.cluster import Cluster
from tacit_lab.cluster_plans import FRAMES, WINDOW, described, of_cluster, plan

COMPUTE = 0.017
"""Seconds of the made step."""


def predicted(
    algorithm: str, nodes: int = 4, ranks: int = 1, each: float = 0.0, rate: float = 1e6, **more: float
) -> Prediction:
    profile = made.with_cost(made.profile(), algorithm, nodes, ranks, each)
    return predict(parse(algorithm), profile, made.network(nodes, ranks, rate, **more))


def test_without_bytes_to_wait_for_a_step_is_its_computing() -> None:
    found = predicted("ddp", rate=1e15)
    assert found.seconds == pytest.approx(COMPUTE)
    assert (found.far, found.near, found.encoding) == pytest.approx((0, 0, 0), abs=1e-9)


def test_on_a_slow_link_the_bytes_take_as_long_as_they_take() -> None:
    found = predicted("ddp")
    ring = 1.5 * made.profile().model_bytes / 1e6
    first = min(each.ready for each in made.profile().step.parameters)
    # The link is busy from the first bucket's gradients on, and training waits for the last byte.
    begins = 0.005 + max(0.004, first)
    assert found.seconds == pytest.approx(begins + ring + 0.002, rel=1e-3)
    assert found.bytes_out == pytest.approx(1e6 * ring, rel=1e-3)


def test_a_period_takes_its_share_of_a_round() -> None:
    found = predicted("localsgd:sync_every=10")
    ring = 1.5 * made.profile().model_bytes / 1e6
    assert found.far == pytest.approx(ring / 10, rel=1e-3)
    assert found.bytes_out == pytest.approx(1e6 * ring / 10, rel=1e-3)
    assert found.seconds == pytest.approx(COMPUTE + found.far, rel=1e-3)
    working = predicted("localsgd:sync_every=10", each=0.01)
    assert working.compute >= COMPUTE + 0.002, "the main thread reads and applies"


def test_what_is_late_is_hidden() -> None:
    at_once = predicted("diloco:sync_every=16", rate=1e7)
    late = predicted("streaming-diloco:sync_every=16,fragments=1,fragment_sync_delay=8,bits=32", rate=1e7)
    assert late.bytes_out == pytest.approx(at_once.bytes_out, rel=0.01)
    assert late.far == pytest.approx(0, abs=1e-6)
    assert at_once.far > 0.0005


def test_encoding_is_waited_for_or_hidden() -> None:
    slow, quick = predicted("topk", each=0.02, rate=1e12), predicted("topk", each=0.0001, rate=1e12)
    assert slow.encoding > 0.03
    assert quick.encoding < 0.001


def test_cores_that_are_shared_make_computing_longer() -> None:
    assert predicted("ddp", rate=1e15, cores=2, sharing=4).seconds == pytest.approx(2 * COMPUTE)


def test_bytes_of_a_rank_on_busy_cores_cost_training_its_processor() -> None:
    alone = predicted("ddp", rate=1e15, cores=1, sharing=1)
    with_bytes = predicted("ddp", rate=1e15, cores=1, sharing=1, per_byte=1e-7)
    spent = 1e-7 * 1.5 * made.profile().model_bytes
    assert with_bytes.seconds == pytest.approx(alone.seconds + spent, rel=0.01)


def test_latency_counts_for_each_hop_of_each_bucket() -> None:
    buckets = 2
    found = predicted("ddp", rate=1e15, latency=0.1)
    assert found.seconds == pytest.approx(COMPUTE + 6 * 2 * 0.1, rel=0.1), "both buckets at once"
    assert buckets == len(made.with_cost(made.profile(), "ddp", 4, 1).costs[0].levels[0].buckets)


def test_a_loader_that_starves_is_waited_for_without_a_core() -> None:
    profile = made.with_cost(made.profile(loading=0.05), "ddp", 4, 1)
    found = predict(parse("ddp"), profile, made.network(rate=1e15, cores=1, sharing=2))
    assert found.seconds == pytest.approx(0.05 + 2 * COMPUTE)
    assert found.compute == pytest.approx(2 * COMPUTE)


def test_buffers_are_broadcast_before_each_forward_pass_where_gradients_are_exchanged() -> None:
    for text, more in (("ddp", 0.3), ("localsgd", 0.0)):
        profile = made.with_cost(made.profile(buffers=300_000), text, 4, 1)
        plain = made.with_cost(made.profile(), text, 4, 1)
        seconds = [predict(parse(text), each, made.network()).seconds for each in (profile, plain)]
        assert seconds[0] - seconds[1] == pytest.approx(more, rel=1e-3), text


@pytest.mark.parametrize("algorithm", ["ddp", "topk", "powersgd", "int8", "diloco:bits=4", "daso", "pipesgd"])
def test_a_step_is_computing_and_waiting_and_nothing_else(algorithm: str) -> None:
    found = predicted(algorithm, 2, 2, each=0.0005)
    steps = found.seconds and round(max(span.ended for span in found.spans) / found.seconds)
    rows = {(span.row, span.what) for span in found.spans}
    waited = sum(s.ended - s.begun for s in found.spans if s.row == MAIN and s.what == WAITING)
    worked = sum(s.ended - s.begun for s in found.spans if s.row == MAIN and s.what != WAITING)
    assert waited + worked == pytest.approx(steps * found.seconds, rel=0.02)
    assert waited == pytest.approx(steps * (found.far + found.near + found.encoding), rel=0.02, abs=1e-6)
    assert {row for row, _ in rows} <= {MAIN, ENCODING, "net", "node"}


def test_between_nodes_and_inside_them_are_told_apart() -> None:
    found = predicted("ednncomm:sync_every=4", 2, 2, near_rate=1e6)
    assert found.far > 0
    assert found.near > 0
    assert predicted("ednncomm:sync_every=4", 4, 1).near == 0


def test_a_kept_variance_is_foretold_between_its_renewals() -> None:
    found, alone = (
        predicted("zeroone-adam:freeze_step=30,sync_every=4"),
        predicted("lowbit:bits=2,sync_every=4"),
    )
    assert found.bytes_out == pytest.approx(alone.bytes_out)
    assert found.seconds == pytest.approx(alone.seconds, rel=0.02)
    assert found.notes == ("after its first steps; without those in which gradients travel again",)


def test_replicas_of_adam_wait_for_samples_of_each_other_every_eighth_step() -> None:
    profile = made.with_cost(made.profile(), "lowbit:sync_every=8", 4, 1)
    adam = replace(profile, state_bytes=2 * profile.model_bytes)
    network = made.network(rate=1e15, latency=0.1)
    plain, compared = (predict(parse("lowbit:sync_every=8"), each, network) for each in (profile, adam))
    assert compared.far - plain.far == pytest.approx(2 * 0.1 / 8, rel=1e-3), "they gather in one round trip"
    many = made.with_cost(adam, "lowbit:sync_every=8", 20, 1)
    network = made.network(20, rate=1e15, latency=0.1)
    both = (replace(many, state_bytes=0), many)
    plain, compared = (predict(parse("lowbit:sync_every=8"), each, network) for each in both)
    assert compared.far - plain.far == pytest.approx(38 * 2 * 0.1 / 8, rel=1e-3)


def test_messages_after_a_pause_take_longer() -> None:
    """Of 77 kB, to three peers: two round trips more where rounds are far apart."""
    often, seldom = (
        predicted(f"localsgd:topology=direct,sync_every={period}", rate=1e12, latency=0.03)
        for period in (1, 40)
    )
    assert often.far == pytest.approx(0.06, rel=0.01)
    assert 40 * seldom.far == pytest.approx(0.06 * 3, rel=0.01)


def test_direct_sums_take_one_round_trip() -> None:
    for text, trips in (("dense:topology=direct", 1), ("powersgd:topology=direct", 2), ("powersgd", 12)):
        found = predicted(text, rate=1e15, latency=0.1)
        assert found.far == pytest.approx(0.2 * trips, rel=0.1), text


def test_a_ring_that_was_measured_has_the_latency_of_one_way() -> None:
    assert RingCost(trip=0.06).latency == 0.03
    net = networks.of_ring(4, 1, 1e15, RingCost(trip=0.06).latency, made.profile())
    assert net.transfer("AllReduce", WORLD, 6, 6).delay == pytest.approx(6 * 0.06)


def test_connections_are_worth_what_several_streams_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    def between(value: float) -> Matrix:
        return ((None, value), (value, None))

    one = {"rate": between(1e8), "rate_both_ways": between(1e8), "latency": between(0.03)}
    links = Links(
        ("a", "b"), ((0,), (1,)), **one, rate_of_flows=between(3e8), flows=4, backend="gloo", date=""
    )
    for count, gain in (("1", 1.0), ("2", 2.0), ("8", 3.0)):
        monkeypatch.setenv("TACIT_CONNECTIONS", count)
        assert networks.measured(links, made.profile()).connections == gain


def test_a_connection_carries_a_window_in_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (1, 2, 16):
        monkeypatch.setenv("TACIT_CONNECTIONS", str(count))
        found = described(4, 1, [1e9] * 4, 0.03, made.profile())
        assert found.rate == pytest.approx(WINDOW / 0.06)
        assert found.rate * found.connections == pytest.approx(min(count * WINDOW / 0.06, 1e9 * FRAMES / 8))
    assert described(4, 1, [1e8] * 4, 0.03, made.profile()).connections == 1.0, "which one connection fills"


def test_a_connection_has_its_own_pace_where_packets_are_lost() -> None:
    lossy = Cluster.parse("4x1@100mbit,100ms,1%loss")
    assert of_cluster(lossy, made.profile()).rate == pytest.approx(lossy.pace)
    assert of_cluster(Cluster.parse("4x1@1gbit,1ms,2places=30ms"), made.profile()).latency > 0.03


def test_what_cannot_be_foretold_is_refused_by_name() -> None:
    for text, why in (("ps", "server"), ("lag", "gradients"), ("lowbit:entropy=true", "gradients")):
        with pytest.raises(ConfigError, match=why):
            predict(parse(text), made.profile(), made.network())


def test_a_plan_has_the_fastest_first_and_what_was_left_out() -> None:
    profile = made.profile()
    for text in ("ddp", "topk", "localsgd:sync_every=10"):
        profile = made.with_cost(profile, text, 4, 1, 1e-5)
    found = plan(profile, made.network(), ["ddp", "topk", "ps", "localsgd:sync_every=10", "dgc"])
    seconds = [each.seconds for each in found.predictions]
    assert seconds == sorted(seconds)
    assert found.predictions[-1].algorithm == "ddp"
    assert set(found.refused) == {"ps", "dgc"}
    assert "costs on 4x1" in found.refused["dgc"]
    assert "tacit profile --algorithms" in found.measuring
    assert found.speedup(found.predictions[0]) == pytest.approx(seconds[-1] / seconds[0])
    with pytest.raises(ConfigError, match="nothing can be predicted: ps"):
        plan(profile, made.network(), ["ps"])


def test_a_plan_leaves_out_what_does_not_fit_the_memory() -> None:
    profile = made.with_cost(made.profile(), "ddp", 4, 1)
    needed = 2 * profile.model_bytes
    assert plan(profile, made.network(), ["ddp"], memory=needed).predictions
    with pytest.raises(ConfigError, match="GB"):
        plan(profile, made.network(), ["ddp"], memory=needed - 1)


def test_described_links_carry_payload_in_frames() -> None:
    profile = replace(made.profile(), cores=2)
    real = described(4, 2, [1e9, 1e8, 1e9, 1e9], 0.01, profile)
    assert real.rate == pytest.approx(1e8 / 8 * FRAMES)
    assert real.cores / real.sharing >= 1
    emulated = described(4, 2, [None] * 4, 0.0, profile, emulated=True)
    assert (emulated.cores, emulated.sharing) == (2, 8)
    assert emulated.rate == float("inf")


def test_unequal_stretches_wait_for_one_times_the_bytes_of_the_slow_link() -> None:
    profile = made.with_cost(made.with_cost(made.profile(), "uneven", 4, 1), "ddp", 4, 1)
    network = described(4, 1, [1e8, 1e8, 1e8, 1e7], 0.0, profile, cores=100.0)
    assert network.rates == pytest.approx([1e8 / 8 * FRAMES] * 3 + [1e7 / 8 * FRAMES])
    network = replace(network, latency=0.0)
    even = replace(network, rates=())
    ddp, uneven = (predict(parse(text), profile, network) for text in ("ddp", "uneven"))
    once = profile.model_bytes / network.rate
    assert ddp.far == pytest.approx(predict(parse("ddp"), profile, even).far)
    # Two buckets of a few chunks each: what the first sends, and the last gets, has nothing beside it.
    assert once < uneven.seconds < 1.4 * once + COMPUTE
    assert ddp.seconds / uneven.seconds > 1.1
    assert predict(parse("uneven"), profile, even).seconds > 1.3 * uneven.seconds


def test_topologies_by_links_are_told_a_networks_rates() -> None:
    profile = made.profile()
    network = described(3, 2, [1e8, None, 1e7], 0.0, profile)
    topology = networks.strategy_on(network, parse("uneven")).levels[0].topology
    assert topology.rates[4:] == pytest.approx([0.5e7 * FRAMES] * 2)  # type: ignore[attr-defined]
    given = parse("uneven:rates=5/5/5/5/5/5")
    assert networks.strategy_on(network, given) == given
    levels = networks.strategy_on(network, parse("daso"))
    assert levels == parse("daso")


def test_more_ranks_than_can_be_looked_at_one_by_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="predicted for up to 64 ranks"):
        made.with_cost(made.profile(), "uneven", 65, 1)


def test_thousands_of_ranks_are_predicted_without_compilers_and_without_a_list_of_all_links() -> None:
    script = """
import sys
import made_training as made
from tacit.algorithms import parse
from tacit.contracts import WORLD
from tacit.planning.cluster_prediction import predict
for text in ("ddp", "bf16", "topk", "dgc", "powersgd", "localsgd"):
    profile = made.with_cost(made.profile(), text, 1024, 8, 0.0)
    predict(parse(text), profile, made.network(1024, 8, 1e6))
print(*({"numba", "torch._dynamo"} & {*sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
