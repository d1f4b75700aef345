"""Trees and gossip graphs by the links' rates: against all trees there are, and by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.contracts import LinkRates
from tacit.errors import ConfigError
from tacit.topologies import Gossip
from tacit.topologies.link_graphs import Tree, gossip_weights, spanning_tree, symmetric


def matrices(least: int, most: int) -> st.SearchStrategy[list[list[float]]]:
    rate = st.sampled_from([1.0, 2.0, 3.0, 10.0, 100.0]) | st.floats(1e-3, 1e11)
    return st.integers(least, most).flatmap(
        lambda n: st.lists(st.lists(rate, min_size=n, max_size=n), min_size=n, max_size=n)
    )


def every_tree(count: int, root: int) -> list[Tree]:
    found = []
    others = [rank for rank in range(count) if rank != root]
    for parents in product(range(count), repeat=len(others)):
        tree = Tree(root, tuple(dict(zip(others, parents, strict=True)).get(rank) for rank in range(count)))
        if len({*tree.order()}) == count == len(tree.order()):
            found.append(tree)
    return found


@given(matrices(1, 4), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_no_tree_has_a_faster_slowest_link(rates: list[list[float]], root: int) -> None:
    root %= len(rates)
    tree = spanning_tree(rates, root)
    assert sorted(tree.order()) == [*range(len(rates))]
    assert tree.order()[0] == tree.root == root
    assert tree.bottleneck(rates) == max(each.bottleneck(rates) for each in every_tree(len(rates), root))


def test_equally_fast_links_make_a_flat_tree() -> None:
    assert spanning_tree([[1.0] * 5] * 5, 2).parents == (2, 2, None, 2, 2)
    assert spanning_tree([[None] * 3] * 3).parents == (None, 0, 0)


def test_a_slow_link_is_gone_round() -> None:
    rates = [[9.0, 1.0, 5.0], [1.0, 9.0, 5.0], [5.0, 5.0, 9.0]]
    assert spanning_tree(rates, 0).parents == (None, 2, 0)
    assert spanning_tree(rates, 0).bottleneck(rates) == 5.0


@given(matrices(1, 8))
@settings(max_examples=100, deadline=None)
def test_weights_are_doubly_stochastic_and_connected(rates: list[list[float]]) -> None:
    weights = gossip_weights(rates)
    topology = Gossip(graph=weights)  # refuses what is not
    w = torch.tensor(topology.rows(len(rates), 0), dtype=torch.float64)
    assert torch.equal(w, w.T)
    assert float(w.min()) >= 0
    assert float(w.diagonal().min()) > 0
    second = sorted(torch.linalg.eigvalsh(w).abs().tolist())[-2] if len(rates) > 1 else 0.0
    assert second < 1 - 1e-9, "replicas come together"


def test_weights_by_hand() -> None:
    assert gossip_weights([[None]]) == ((1.0,),)
    even = gossip_weights([[1.0] * 4] * 4)
    assert torch.allclose(torch.tensor(even), torch.full((4, 4), 0.25))
    slow = [[10.0, 10.0, 10.0, 1.0], [10.0, 10.0, 10.0, 1.0], [10.0, 10.0, 10.0, 1.0], [1.0] * 4]
    weights = torch.tensor(gossip_weights(slow))
    assert (weights[3] > 0).tolist() == [True, False, False, True], "one slow link, and no more"
    assert 0 < weights[3, 0] < weights[1, 0]


def test_a_slow_link_between_two_fast_ones_is_left_out() -> None:
    rates = [[9.0, 1.0, 5.0], [1.0, 9.0, 5.0], [5.0, 5.0, 9.0]]
    weights = gossip_weights(rates)
    assert weights[0][1] == weights[1][0] == 0.0
    assert weights[0][2] > 0 < weights[1][2]


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ([], "no square matrix"),
        ([[1.0, 2.0]], "no square matrix"),
        ([[1.0, 0.0], [1.0, 1.0]], "rate from 0 to 1 is 0"),
        ([[1.0, 1.0], [-2.0, 1.0]], "rate from 1 to 0 is -2"),
        ([[1.0, float("nan")], [1.0, 1.0]], "rate from 0 to 1 is nan"),
    ],
)
def test_what_is_no_matrix_of_rates_is_refused(rates: list[list[float]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        symmetric(rates)


def test_no_such_root() -> None:
    with pytest.raises(ConfigError, match="root=3 is no rank of 2"):
        spanning_tree([[1.0] * 2] * 2, 3)


def test_gossip_is_made_for_measured_links() -> None:
    measured = Gossip(graph="measured")
    assert measured.needs_rates
    assert not Gossip().needs_rates
    fast, slow = 1e9, 1e8
    links = LinkRates(((None, fast, slow), (fast, None, slow), (slow, slow, None)), ((0, 1), (2, 3), (4, 5)))
    made = measured.for_rates(links)
    assert isinstance(made, Gossip)
    assert isinstance(made.graph, tuple)
    w = torch.tensor(made.graph)
    assert w[4, 5] > w[4, 0] > 0
    assert int((w[4:, :4] > 0).sum()) == 1, "one link to the slow node"
    with pytest.raises(ConfigError, match="measured when it is attached"):
        measured.rows(6, 0)
