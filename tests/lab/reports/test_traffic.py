"""The tables of who sent how much to whom."""

import re
from dataclasses import replace

import pytest
import torch
from sample_records import ALONE, DDP, HEAD, TOPK, WHOLE, comparison

from tacit_lab.cli.run.traffic import matrix, printed
from tacit_lab.cluster import Cluster
from tacit_lab.recipes.traffic import Traffic
from tacit_lab.records import EndRecord, RunRecord, parse
from tacit_lab.reports import compare, page
from tacit_lab.reports.charts.figures import Style
from tacit_lab.reports.traffic import traffic
from tacit_lab.testbed.network import peers
from tacit_lab.testbed.network.peers import PeerBytes

MB = 10**6
RING = [[0, 20 * MB, 0, MB], [MB, 0, 20 * MB, 0], [0, MB, 0, 20 * MB], [20 * MB, 0, MB, 0]]
STAR = [[0, 3000, 5 * MB], [2000, 0, 4 * MB], [6 * MB, 7 * MB, 0]]
PAINT = {name: Style(f"--c{i}") for i, name in enumerate(("ddp", TOPK.algorithm, "ps"))}
FOUR = replace(HEAD, cluster="4x1@100mbit")


def drawn(end: EndRecord, head: RunRecord = FOUR) -> list[list[str]]:
    """The rows of the only table, their heads first."""
    html = traffic(comparison(end, ALONE, head=head), PAINT)
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in re.findall(r"<tr>(.*?)</tr>", html)]


def test_a_cell_says_what_went_from_row_to_column_and_the_edges_add_up() -> None:
    head, *rows, received = drawn(replace(DDP, traffic=RING))
    assert head == ["from \\ to", "0", "1", "2", "3", "sent"]
    assert rows[0] == ["node 0", "", "20.0", "0.0", "1.0", "21.0"]
    assert rows[3] == ["node 3", "20.0", "0.0", "1.0", "", "21.0"]
    assert received == ["received", "21.0", "21.0", "21.0", "21.0", "84.0"]


def test_servers_are_named_behind_the_nodes_with_ranks() -> None:
    head, *rows, _ = drawn(replace(DDP, traffic=STAR), replace(HEAD, cluster="2x1+1@100mbit"))
    assert head == ["from \\ to", "0", "1", "server 0", "sent"]
    assert rows[2] == ["server 0", "6.00", "7.00", "", "13.00"]


def test_the_largest_cell_has_the_deepest_colour_and_it_is_the_algorithms() -> None:
    html = traffic(comparison(replace(TOPK, traffic=RING), head=FOUR), PAINT)
    shades = [int(each) for each in re.findall(r"--heat: (\d+)%", html)]
    assert (sorted(set(shades)), shades.count(62)) == ([0, 3, 62], 4)
    assert html.count('style="--hue: var(--c1)"') == 1


def test_there_is_a_table_for_each_algorithm_and_none_without_counts() -> None:
    html = page(comparison(replace(DDP, traffic=RING), replace(TOPK, traffic=RING), ALONE, head=FOUR))
    assert html.count('<div class="heat"') == 2
    assert "<h2>Who sent how much to whom</h2>" in html
    assert "Who sent how much" not in page(WHOLE)
    alone = replace(DDP, traffic=[[0]])
    assert "Who sent how much" not in page(comparison(alone, head=replace(HEAD, cluster="1x4")))


def test_sixteen_nodes_have_a_line_of_the_page_for_themselves() -> None:
    many = [[0 if i == j else MB * (i + j) for j in range(16)] for i in range(16)]
    html = traffic(comparison(replace(DDP, traffic=many), head=replace(HEAD, cluster="16x1")), PAINT)
    assert html.count('<div class="heat wide"') == 1
    assert html.count("<td") == 16 * 16 + 2 * 16 + 1


def test_everything_in_it_is_escaped() -> None:
    evil = "<b>"
    html = traffic(comparison(replace(DDP, algorithm=evil, traffic=RING), head=FOUR), {evil: Style("--c0")})
    assert evil not in html
    assert "&lt;b&gt;: MB" in html


def test_it_survives_the_way_through_the_file_and_is_in_the_json() -> None:
    end = replace(DDP, traffic=RING)
    assert parse(end.to_json()) == end
    assert compare(comparison(end)).to_dict()["rows"][0]["traffic"] == RING


def test_records_of_before_say_nothing_of_it() -> None:
    old = DDP.to_json().replace(', "traffic": null', "")
    assert old != DDP.to_json()
    assert parse(old) == DDP


# ---- what is counted ----------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, told: Traffic, now: PeerBytes | None) -> torch.Tensor:
    monkeypatch.setattr(peers, "read", lambda: now)
    return told.read()


def test_windows_add_up_and_servers_are_known_by_what_others_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes of two ranks, and a server. One process of a node counts."""
    ranks = [Traffic(2, 1, node) for node in (0, None, 1, None)]
    before = [PeerBytes({1: 10, 2: 20}, {2: 5}), None, PeerBytes({0: 1}, {0: 10}), None]
    after = [
        PeerBytes({1: 110, 2: 220}, {1: 9, 2: 305}),
        None,
        PeerBytes({0: 2, 2: 40}, {0: 110, 2: 7}),
        None,
    ]
    grown = []
    for rank, then, now in zip(ranks, before, after, strict=True):
        first, last = counted(monkeypatch, rank, then), counted(monkeypatch, rank, now)
        grown.append(torch.cat([first[:1], last[1:] - first[1:]]))
    total = Traffic(2, 1, None)
    for _ in range(2):
        total.add(torch.stack(grown))
    assert total.matrix == [[0, 200, 400], [2, 0, 80], [600, 14, 0]]


def test_it_is_not_known_where_a_node_could_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Traffic(2, 0, 0)
    nothing = counted(monkeypatch, rank, None)
    rank.add(torch.cat([nothing[:1], nothing[1:] - nothing[1:]])[None])
    assert rank.matrix is None


def test_of_a_script_it_is_what_the_processes_of_a_node_counted() -> None:
    """Two ranks a node, which looked at the same counters at different times; and a server."""
    processes = [
        {"node": 0, "exchanged_before": [{}, {}], "exchanged_after": [{"1": 50, "2": 8}, {"2": 9}]},
        {"node": 0, "exchanged_before": [{"1": 5}, {}], "exchanged_after": [{"1": 60, "2": 8}, {"2": 9}]},
        {"node": 1, "exchanged_before": [{"0": 3}, {}], "exchanged_after": [{"0": 4}, {"2": 2}]},
    ]
    found = matrix(processes, Cluster.parse("2x2+1"))
    assert found == [[0, 60, 8], [1, 0, 0], [9, 2, 0]]
    assert matrix(processes[:2], Cluster.parse("2x2+1")) is None
    assert matrix([{"node": 0, "before": 1, "after": 2}], Cluster.parse("1x1")) is None


def test_it_is_printed_for_a_few_nodes() -> None:
    assert printed([[0, 12 * MB], [MB, 0]], 2) == [
        "  MB from each node (row) to each other (column):",
        "                   0     1",
        "    0            0.0  12.0",
        "    1            1.0   0.0",
    ]
    assert printed([[0]], 1) == printed([[0] * 9] * 9, 9) == printed(None, 2) == []
