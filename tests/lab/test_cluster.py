from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import for_each
from tacit.errors import ConfigError
from tacit_lab.cluster import Cluster
from tacit_lab.impairment import Impairment
from tacit_lab.testbed import Testbed


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("2x2@100mbit", Cluster(2, 2, 100e6)),
        ("4x1@1gbit,20ms", Cluster(4, 1, 1e9, 0.02)),
        ("2x2", Cluster(2, 2)),
        ("local:4", Cluster(1, 4, namespaces=False)),
        ("1x8@2.5gbit", Cluster(1, 8, 2.5e9)),
        ("2x2@512kbit,150us", Cluster(2, 2, 512e3, 150e-6)),
        ("2x2@20ms", Cluster(2, 2, None, 0.02)),
        ("nodes=[3x1@1gbit,1x1@100mbit]", Cluster(4, 1, rates=(1e9, 1e9, 1e9, 1e8))),
        ("nodes=[1x2@10mbit,1x2@1gbit]", Cluster(2, 2, rates=(1e7, 1e9))),
        ("nodes=[1x1@1gbit,1x1@10mbit]+2", Cluster(2, 1, rates=(1e9, 1e7), servers=2)),
        ("4x1@1gbit+load=50mbit", Cluster(4, 1, 1e9, load=5e7)),
        ("4x1+1@1gbit,1ms+load=50mbit", Cluster(4, 1, 1e9, 1e-3, servers=1, load=5e7)),
        ("2x1+load=50mbit", Cluster(2, 1, load=5e7)),
        (
            "nodes=[2x2@1gbit,1x2@100mbit,20ms+load=30mbit]",
            Cluster(3, 2, rates=(1e9, 1e9, 1e8), latencies=(0, 0, 0.02), loads=(0, 0, 3e7)),
        ),
        ("nodes=[1x1@1gbit,1x1@1gbit,2ms]", Cluster(2, 1, 1e9, latencies=(0, 2e-3))),
        ("nodes=[1x1@1gbit,1x1@1gbit+load=1mbit]", Cluster(2, 1, 1e9, loads=(0, 1e6))),
        ("4x1@100mbit,30ms,0.1%loss", Cluster(4, 1, 1e8, 0.03, impairment=Impairment(loss=1e-3))),
        ("4x1@100mbit,5ms±2ms", Cluster(4, 1, 1e8, 5e-3, impairment=Impairment(jitter=2e-3))),
        ("4x1@100mbit,1ms,2places=30ms", Cluster(4, 1, 1e8, 1e-3, sites=2, apart=0.03)),
        ("6x2+1@3places=30ms+load=1mbit", Cluster(6, 2, servers=1, load=1e6, sites=3, apart=0.03)),
        ("2x1@100mbit,nat", Cluster(2, 1, 1e8, impairment=Impairment(nat=True))),
        (
            "nodes=[1x1@1gbit,nat,1x1@1gbit]",
            Cluster(2, 1, 1e9, impairments=(Impairment(nat=True), Impairment())),
        ),
        ("4x1@mtu=1280+load=1mbit", Cluster(4, 1, impairment=Impairment(mtu=1280), load=1e6)),
        (
            "nodes=[1x1@1gbit,5ms±1ms,2%loss,mtu=576,1x1@1gbit]+1",
            Cluster(
                *(2, 1, 1e9),
                latencies=(5e-3, 0),
                impairments=(Impairment(0.02, 1e-3, 576), Impairment()),
                servers=1,
            ),
        ),
    ],
)
def test_parses_and_writes_back(text: str, cluster: Cluster) -> None:
    assert Cluster.parse(text) == cluster
    assert str(cluster) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" 2X2@100MBit ", "2x2@100mbit"),
        ("2x2@1000mbit", "2x2@1gbit"),
        ("2x2@0.5gbit, 1s", "2x2@500mbit,1s"),
        ("2x2@100mbit,0ms", "2x2@100mbit"),
        ("LOCAL:2", "local:2"),
        ("nodes=[2@1gbit,2@100mbit]", "nodes=[1x2@1gbit,1x2@100mbit]"),
        ("nodes=[2@1gbit, 2@1gbit]", "2x2@1gbit"),
        ("Nodes=[3x1@1gbit, 1@100mbit, 5ms+load=10mbit]", "nodes=[3x1@1gbit,1x1@100mbit,5ms+load=10mbit]"),
        ("nodes=[2x1@1gbit,1ms,1x1@1gbit,1ms]", "3x1@1gbit,1ms"),
        ("4x1@100mbit,5ms+-2ms", "4x1@100mbit,5ms±2ms"),
        ("4x1@100mbit, MTU=1280, 1.50%Loss, 0ms±0ms", "4x1@100mbit,1.5%loss,mtu=1280"),
        ("nodes=[1@1gbit,0%loss,1@1gbit,mtu=1500]", "2x1@1gbit"),
        ("4x1@1gbit, 2places=0.03s, 1%loss", "4x1@1gbit,1%loss,2places=30ms"),
    ],
)
def test_other_spellings_mean_the_canonical_one(text: str, canonical: str) -> None:
    assert str(Cluster.parse(text)) == canonical


@given(
    st.integers(1, 999),
    st.integers(1, 4),
    st.none() | st.floats(1e-3, 1e15),
    st.just(0.0) | st.floats(1e-9, 1e4),
    st.just(0.0) | st.floats(1e-6, 0.999),
    st.floats(1e-3, 1),
    st.integers(576, 9000),
)
def test_text_says_it_all(
    nodes: int, ranks: int, rate: float | None, latency: float, loss: float, spread: float, mtu: int
) -> None:
    cluster = Cluster(nodes, ranks, rate, latency, impairment=Impairment(loss, latency * spread, mtu))
    assert Cluster.parse(str(cluster)) == cluster


@given(
    st.lists(
        st.tuples(st.floats(1e3, 1e12), st.just(0.0) | st.floats(1e-9, 10), st.just(0.0) | st.floats(1, 999)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_text_of_uneven_nodes_says_it_all(
    links: list[tuple[float, float, float]], ranks: int, servers: int
) -> None:
    rates, latencies, loads = zip(*links, strict=True)
    cluster = Cluster(len(links), ranks, servers=servers, rates=rates, latencies=latencies, loads=loads)
    assert Cluster.parse(str(cluster)) == cluster
    found = [(cluster.rate_of(i), cluster.latency_of(i), cluster.load_of(i)) for i in range(len(links))]
    assert found == links
    assert [cluster.free_rate_of(i) for i in range(len(links))] == [rate - load for rate, _, load in links]


@for_each(
    "text",
    [
        "",
        "   ",
        "2",
        "2x",
        "x2",
        "2*2",
        "2x2x2",
        "0x2",
        "2x0",
        "-1x2",
        "2x-1",
        "1.5x2",
        "²x2",
        "2x2@",
        "2x2@100",
        "2x2@100mb",
        "2x2@100mbps",
        "2x2@0mbit",
        "2x2@-5mbit",
        "2x2@nanmbit",
        "2x2@1e3mbit",
        "2x2@100mbit,",
        "2x2@100mbit,20",
        "2x2@100mbit,-1ms",
        "2x2@20ms,100mbit",
        "2x2@100mbit,20ms,1ms",
        "2x2@1gbit,1gbit",
        "2x2@1gbit,100%loss",
        "2x2@1gbit,-1%loss",
        "2x2@1gbit,1%loss,1%loss",
        "2x2@1gbit,mtu=575",
        "2x2@1gbit,mtu=9001",
        "2x2@1gbit,mtu=",
        "2x2@1gbit,nat,nat",
        "2x2@1gbit,nats",
        "4x1@2places",
        "4x1@2places=30",
        "4x1@2places=30mbit",
        "4x1@2places=3ms,2places=3ms",
        "nodes=[2@1gbit,2places=3ms,2@1gbit]",
        "2x2@1gbit,5ms±6ms",
        "2x2@1gbit,±1ms",
        "2x2@1gbit,5ms±",
        "2x2@1gbit,5ms±1gbit",
        "2x2@1gbit±1ms",
        "local:2@5ms",
        "nodes=[1@5ms,1%loss,1@1gbit]",
        "2x2@1gbit+load=1gbit",
        "2x2@1gbit+load=1ms",
        "2x2@1gbit+load=",
        "2x2+load=5mbit@1gbit",
        "local:2+load=5mbit",
        "2x2@100mbit please",
        "local:0",
        "local",
        "local:2@100mbit",
        "remote:2",
    ],
)
def test_bad_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2x2@100mbit|nodes="):
        Cluster.parse(text)


@for_each("word", ["1%", "loss=1%", "0.01loss", "1%lost"])
def test_a_loss_in_another_form_is_refused_with_the_right_one(word: str) -> None:
    with pytest.raises(ConfigError, match=rf"'{word}' as a loss .* for example 1%loss\."):
        Cluster.parse(f"4x1@100mbit,30ms,{word}")


@for_each("text", ["local:2@100mbit", "local:2+load=5mbit", "local:2,30ms", "local:4@100mbit,30ms"])
def test_local_processes_have_no_links(text: str) -> None:
    with pytest.raises(ConfigError, match=r"plain local processes have no links.* Write for example 2x2@"):
        Cluster.parse(text)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("100%loss", r"cannot lose 100 % of its packets: write 0 % or more, and less than 100 %\."),
        ("mtu=575", "an MTU cannot be 575 bytes: write 576, which every host takes, to 9,000"),
        (
            "3places=30ms",
            "4 nodes cannot be at 3 places: write 2 or more .* as many nodes at each",
        ),
        ("1places=30ms", "4 nodes cannot be at 1 places"),
        ("30ms,2places=20ms", "a latency of 20ms between places cannot be: .* inside them, which is 30ms"),
    ],
)
def test_what_no_link_does_is_refused_with_what_to_write(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"{why}.* Write for example"):
        Cluster.parse(f"4x1@100mbit,{word}")


def test_nodes_of_a_place_follow_each_other_and_servers_are_at_the_first() -> None:
    cluster = Cluster.parse("6x1+1@1gbit,1ms,3places=30ms")
    assert [cluster.site_of(place) for place in range(7)] == [0, 0, 1, 1, 2, 2, 0]
    assert cluster.most_latency == 0.03
    assert cluster.shaped
    with pytest.raises(ConfigError, match="cannot be emulated"):
        Cluster.parse("4x1@2places=300s").check_emulated()


@pytest.mark.parametrize(
    ("text", "megabits"),
    [
        ("4x1@100mbit,30ms,0.1%loss", 7.48),
        ("4x1@100mbit,100ms,1%loss", 0.709),
        ("4x1@1gbit,1ms,0.1%loss,2places=30ms", 7.48),
        ("nodes=[1@1gbit,1%loss,1@1gbit,20ms]", 7.09),
        ("4x1@100mbit,30ms", float("inf")),
    ],
)
def test_a_connection_has_the_pace_of_reno_where_packets_are_lost(text: str, megabits: float) -> None:
    assert Cluster.parse(text).pace * 8e-6 == pytest.approx(megabits, rel=1e-3)


@for_each(
    "values",
    [
        {"nodes": 0, "ranks_per_node": 1},
        {"nodes": 1 << 11, "ranks_per_node": 1 << 10},
        {"nodes": 2, "ranks_per_node": 1, "rates": (1e6,)},
        {"nodes": 1, "ranks_per_node": 1, "rate": 1e6, "rates": (1e6,)},
        {"nodes": 1, "ranks_per_node": 1, "rates": (0.0,)},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "latencies": (0.0, -1.0)},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "loads": (0.0, float("nan"))},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "loads": (0.0, 1e6)},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "load": 1.0, "loads": (0.0, 1.0)},
        {"nodes": 2, "ranks_per_node": 1, "rates": (1e6, 1e7), "load": 2e6},
        {"nodes": 2, "ranks_per_node": 1, "loads": (0.0, 1e6)},
        {"nodes": 2, "ranks_per_node": 1, "latencies": (0.0, 1.0)},
        {"nodes": 1, "ranks_per_node": 1, "load": 1.0, "namespaces": False},
        {"nodes": 1, "ranks_per_node": 10**30, "namespaces": False},
        {"nodes": 1, "ranks_per_node": -1},
        {"nodes": 1, "ranks_per_node": 1, "rate": 0.0},
        {"nodes": 1, "ranks_per_node": 1, "rate": float("inf")},
        {"nodes": 1, "ranks_per_node": 1, "latency": float("nan")},
        {"nodes": 2, "ranks_per_node": 1, "namespaces": False},
        {"nodes": 1, "ranks_per_node": 1, "rate": 1e6, "namespaces": False},
        {"nodes": 1, "ranks_per_node": 1, "impairment": Impairment(0.1), "namespaces": False},
        {"nodes": 2, "ranks_per_node": 1, "impairments": (Impairment(0.1), Impairment())},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "impairment": Impairment(jitter=1e-3)},
        {"nodes": 2, "ranks_per_node": 1, "sites": 0, "apart": 1.0},
        {"nodes": 2, "ranks_per_node": 1, "apart": 1.0},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "latencies": (0.0, 0.5), "sites": 2, "apart": 1.0},
    ],
)
def test_impossible_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Cluster(**values)  # type: ignore[arg-type]


@for_each(
    "values",
    [
        {"nodes": 1024, "ranks_per_node": 1},
        {"nodes": 1000, "ranks_per_node": 1, "servers": 24},
        {"nodes": 1, "ranks_per_node": 4097},
        {"nodes": 2, "ranks_per_node": 1, "rate": 999.0},
        {"nodes": 2, "ranks_per_node": 1, "rates": (1e6, 1.0)},
        {"nodes": 2, "ranks_per_node": 1, "rates": (1e6, 35e9)},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "latency": 241.0},
        {"nodes": 2, "ranks_per_node": 1, "rate": 1e6, "latencies": (0.1, 4e-7)},
    ],
)
def test_what_one_machine_cannot_emulate_can_be_planned(values: dict[str, float]) -> None:
    cluster = Cluster(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be emulated"):
        cluster.check_emulated()
    with pytest.raises(ConfigError, match="cannot be emulated"):
        Testbed(cluster)


@for_each(
    "text",
    [
        *("nodes=[]", "nodes=[3x1]", "nodes=[1x1@1gbit,1x2@1gbit]", "nodes=[1x1@20ms]", "nodes=[1x1@1gbit"),
        *("nodes=[0x1@1gbit]", "nodes=[1x1@1gbit,2@1gbit]", "nodes=[2,2@1gbit]", "nodes=[1@1gbit,5ms,5ms]"),
        *("nodes=[1@1gbit+load=5ms]", "nodes=[1@1gbit+load=0mbit]", "nodes=[1@1gbit]+load=5mbit"),
        *("nodes=[1@1gbit+load=]", "nodes=[1@1gbit+load=5mbit,5ms]", "nodes=[1@1mbit+load=1gbit]"),
    ],
)
def test_uneven_nodes_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"2x2@100mbit|nodes=\["):
        Cluster.parse(text)


def test_a_server_has_the_fastest_link_of_uneven_nodes() -> None:
    cluster = Cluster(2, 1, rates=(1e6, 1e9), servers=1)
    assert [cluster.rate_of(place) for place in range(3)] == [1e6, 1e9, 1e9]
    assert cluster.shaped


def test_a_server_has_the_earliest_link_and_no_load() -> None:
    cluster = Cluster(2, 1, 1e9, latencies=(0.5, 0.1), load=1e6, servers=1)
    assert [cluster.latency_of(place) for place in range(3)] == [0.5, 0.1, 0.1]
    assert [cluster.load_of(place) for place in range(3)] == [1e6, 1e6, 0.0]
    assert cluster.loaded


def test_a_server_loses_as_little_as_the_best_node() -> None:
    cluster = Cluster.parse("nodes=[1@1gbit,2%loss,1@1gbit,1%loss,mtu=1280]+1")
    assert [cluster.impairment_of(place).loss for place in range(3)] == [0.02, 0.01, 0.01]
    assert cluster.shaped


def test_servers_and_the_first_of_equal_nodes_are_behind_no_nat() -> None:
    def hidden(text: str) -> list[bool]:
        cluster = Cluster.parse(text)
        return [cluster.impairment_of(place).nat for place in range(cluster.places)]

    assert hidden("3x1+1@1gbit,nat") == [False, True, True, False]
    assert hidden("nodes=[1@1gbit,nat,1@1gbit]+1") == [True, False, False]


@for_each("values", [{"loss": 1.0}, {"loss": float("nan")}, {"jitter": float("inf")}, {"mtu": 100}])
def test_no_link_is_so_impaired(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Write for example"):
        Impairment(**values)  # type: ignore[arg-type]


def test_world_size() -> None:
    assert Cluster.parse("3x4").world_size == 12
