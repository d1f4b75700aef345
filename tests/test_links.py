"""Measured links as a value: what is read back, what is refused, and what its text points out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tacit.errors import ConfigError
from tacit.links import Links, Matrix
from tacit.transports.probing import _next, _turns
from tacit_lab.reports.links import page


def matrix(value: float, nodes: int = 3, **other: float) -> Matrix:
    """All the same between nodes; `at_01=` and the like for single ones; nothing within."""
    return tuple(
        tuple(None if i == j else other.get(f"at_{i}{j}", value) for j in range(nodes)) for i in range(nodes)
    )


LINKS = Links(
    hosts=("a", "b", "c"),
    ranks=((0,), (1,), (2,)),
    latency=matrix(2e-4),
    rate=matrix(95e6, at_01=9.5e6),
    rate_of_flows=matrix(95e6, at_01=9.5e6),
    rate_both_ways=matrix(95e6, at_01=9.5e6),
    flows=4,
    backend="gloo",
    date="2026-01-01T00:00:00+00:00",
)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    LINKS.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json") == LINKS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"form": 2}, "another version"),
        ({"rate": [[None, 1.0], [1.0, None]]}, "its rate is no matrix of 3 x 3"),
        ({"latency": [[None, 0.0, 1.0], [1.0, None, 1.0], [1.0, 1.0, None]]}, "from node 0 to node 1 is 0.0"),
        ({"resent": [0.1]}, "3 hosts and what 1 nodes have sent again"),
        ({"ranks": [[0], [1]]}, "3 hosts and the ranks of 2 nodes"),
        ({"more": 1}, "it has 'more': it should have hosts, ranks, latency"),
        ({"flows": True}, "it.flows is 'True', where int belongs"),
        ({"latency": [[None, "1"]]}, r"it.latency\[0\]\[1\] is '1', where float belongs"),
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps({**json.loads(LINKS.to_json()), "checksum": None, **change}))
    with pytest.raises(ConfigError, match=said) as raised:
        Links.load(file)
    assert str(file) in str(raised.value)
    assert "give a file that tacit probe --out has written" in str(raised.value)


def test_what_was_changed_is_told_from_what_was_measured() -> None:
    text = LINKS.to_json().replace("9500000.0", "9500001.0")
    with pytest.raises(ConfigError, match="its checksum is that of another content; where you have changed"):
        Links.from_json(text)


@pytest.mark.parametrize("text", ["", "[]", "{}", "not JSON", "[" * 100_000])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the text holds no measured links"):
        Links.from_json(text)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        Links.load(tmp_path / "none.json")


def test_links_of_another_cluster_are_refused() -> None:
    LINKS.check_layout([[0], [1], [2]])
    with pytest.raises(
        ConfigError, match=r"measured on 3 nodes of 1 rank, and this run has 2 nodes of 2 ranks"
    ):
        LINKS.check_layout([[0, 1], [2, 3]])


def test_the_text_points_at_slow_links() -> None:
    assert LINKS.slow() == [(0, 1)]
    assert "Between nodes: 9.5 to 95 Mbit/s, 0.20 ms (median)." in str(LINKS)
    assert "Slower than three quarters of the median: 0 to 1 (9.5)." in str(LINKS)
    even = replace(LINKS, **dict.fromkeys(("rate", "rate_of_flows", "rate_both_ways"), matrix(95e6)))
    assert "Slower" not in str(even)
    assert "streams carry" not in str(even)
    assert "half duplex" not in str(even)


def test_the_text_points_at_links_that_one_stream_does_not_fill() -> None:
    found = str(
        replace(LINKS, rate_of_flows=matrix(300e6, at_01=30e6), rate_both_ways=matrix(48e6, at_01=4.8e6))
    )
    assert "4 streams carry 3.2 times as much as one" in found
    assert "TACIT_CONNECTIONS=4" in found
    assert "GLOO_SOCKET_IFNAME=eth0,eth0,eth0,eth0" in found
    assert "bucket_cap_mb=4" in found
    assert "half duplex" not in found, "what one stream carries says nothing of such a link"


def test_the_text_points_at_shared_links_and_at_losses() -> None:
    shared = replace(LINKS, rate_both_ways=matrix(48e6, at_01=4.8e6), resent=(0.0, 1e-4, 0.0))
    assert "half duplex" in str(shared)
    assert "lost" not in str(shared)
    lossy = str(replace(shared, resent=(0.0, 9e-3, 1e-3)))
    assert "Up to 0.9 % of a node's segments were sent again: packets are lost." in lossy
    assert "tcp_congestion_control=bbr" in lossy
    assert "half duplex" not in lossy, "a stream is slow by chance, then"
    few = replace(shared, resent=(7e-4, 4e-4, 6e-4))
    assert "Up to 0.07 % of a node's segments were sent again, of each some, and rates are uneven" in str(few)
    assert "lost" not in str(replace(few, rate=matrix(95e6)))


def in_places(*places: int, near: float = 2e-4, far: float = 3e-2) -> Links:
    """Nodes that are each in the place of that number."""
    nodes = range(len(places))

    def of(near: float, far: float) -> Matrix:
        return tuple(
            tuple(None if i == j else near if places[i] == places[j] else far for j in nodes) for i in nodes
        )

    rates = dict.fromkeys(("rate", "rate_of_flows", "rate_both_ways"), of(1e9, 1e9))
    hosts, ranks = tuple(map(str, nodes)), tuple((2 * i, 2 * i + 1) for i in nodes)
    return replace(LINKS, hosts=hosts, ranks=ranks, latency=of(near, far), **rates)


def test_places_are_told_by_latency_with_a_topology_that_goes_by_them() -> None:
    found = in_places(0, 0, 1, 1)
    assert found.places() == [[0, 1], [2, 3]]
    assert "There are 2 places: nodes 0, 1; nodes 2, 3. Latency is 0.2 ms at most inside and 30" in str(found)
    assert "bf16:topology=hierarchical, averages inside them first: it saves" in str(found)
    assert in_places(0, 1, 0, 1, 2, 2).places() == [[0, 2], [1, 3], [4, 5]]
    assert "hierarchical" not in str(in_places(0, 0, 1)), "it takes places of one size alone"


@pytest.mark.parametrize(
    "links", [LINKS, in_places(0, 0, 0), in_places(0, 0, 1, 1, far=6e-4), in_places(0, 1)]
)
def test_there_is_one_place_where_latencies_hardly_differ(links: Links) -> None:
    assert len(links.places()) == 1
    assert "places" not in str(links)


def test_nodes_that_are_near_some_and_far_from_others_are_in_one_place() -> None:
    chain = ((None, 1e-4, 3e-2), (1e-4, None, 1e-4), (3e-2, 1e-4, None))
    assert replace(LINKS, latency=chain).places() == [[0, 1, 2]]


def test_one_node_has_no_links() -> None:
    alone = replace(
        LINKS,
        hosts=("a",),
        ranks=((0,),),
        **dict.fromkeys(("latency", "rate", "rate_of_flows", "rate_both_ways"), ((None,),)),
    )
    assert "There is one node" in str(alone)
    assert "–" in page(alone, "tacit probe")


def test_the_page_has_all_measurements() -> None:
    drawn = page(LINKS, "tacit probe --cluster 3x1")
    for title in ("One stream", "4 streams at once", "Both ways at once", "Latency"):
        assert f"<h2>{title}" in drawn
    assert drawn.count("hsl(8 60% 50%") == 3, "the slow link is red in each of the rates"
    assert "0 to 1 (9.5)" in drawn


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8])
def test_turns_have_every_pair_once_and_none_twice_at_a_time(nodes: int) -> None:
    turns = list(_turns(nodes))
    pairs = [pair for turn in turns for pair in turn]
    assert sorted(pairs) == [(i, j) for i in range(nodes) for j in range(i + 1, nodes)]
    for turn in turns:
        ends = [end for pair in turn for end in pair]
        assert len(ends) == len(set(ends))


def test_transfers_grow_until_they_are_long_enough() -> None:
    assert _next(1000, took=0.2, wanted=0.2) == 0
    assert _next(1000, took=0.1, wanted=0.2) == 2000
    assert _next(1000, took=0.001, wanted=0.2) == 4000
    assert _next(64 << 20, took=0.001, wanted=0.2) == 0
