"""Places that latencies show are the nodes of a hierarchy, with the machines as a level inside."""

import logging
from typing import Any, cast

import pytest
import torch.distributed as dist

from cases import for_each
from tacit.algorithms import parse
from tacit.contracts import NET
from tacit.levels import node_layout
from tacit.links import Matrix
from tacit.strategy import Strategy
from tacit.topologies import Hierarchical, Uneven

FOUR = [[0, 1], [2, 3], [4, 5], [6, 7]]


class First:
    """A group of which this is the first rank."""

    def rank(self) -> int:
        return 0


def found(
    monkeypatch: pytest.MonkeyPatch, strategy: Any, places: str, nodes: list[list[int]]
) -> tuple[Any, Any]:
    """The topology and the nodes, where node i is at the place of the i-th letter."""
    latency: Matrix = tuple(
        tuple(None if i == j else 2e-4 if a == b else 3e-2 for j, b in enumerate(places))
        for i, a in enumerate(places)
    )
    monkeypatch.setattr(node_layout, "latencies", lambda group, nodes: latency)
    strategy, nodes = node_layout.by_places(strategy, nodes, cast(dist.ProcessGroup, First()))
    return strategy.levels[0].topology, nodes


def test_machines_of_a_site_are_a_level_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, nodes = found(monkeypatch, parse("topk:topology=hierarchical"), "abab", FOUR)
    assert topology == Hierarchical(near=(2, 2))
    assert nodes == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert "between places" in topology.summary([])


def test_machines_of_one_rank_make_two_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    topology, nodes = found(monkeypatch, parse("bf16:topology=hierarchical"), "aabb", [[0], [1], [2], [3]])
    assert topology == Hierarchical(near=(2,))
    assert nodes == [[0, 1], [2, 3]]


def test_sites_of_unequal_size_are_named_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = parse("bf16:topology=hierarchical")
    with caplog.at_level(logging.WARNING, "tacit"):
        topology, nodes = found(monkeypatch, strategy, "aaab", FOUR)
    assert (topology, nodes) == (Hierarchical(), FOUR)
    assert (
        "nodes are at 2 places: [[0, 1, 2], [3]]; 'bf16:topology=hierarchical' goes by nodes" in caplog.text
    )


@for_each(
    "strategy",
    [
        parse("bf16"),
        parse("ednncomm"),
        Strategy(topology=Hierarchical(near=(2,))),
        Strategy(topology=Hierarchical(far=Uneven(NET))),
    ],
)
def test_what_does_not_go_by_sites_measures_nothing(monkeypatch: pytest.MonkeyPatch, strategy: Any) -> None:
    topology, nodes = found(monkeypatch, strategy, "", FOUR)
    assert (topology, nodes) == (strategy.levels[0].topology, FOUR)
