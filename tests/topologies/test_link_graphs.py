"""Trees and gossip graphs by the links' rates: against all trees there are, and by hand."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.contracts import LinkRates
from tacit.errors import ConfigError
from tacit.topologies import Gossip, LinkTree
from tacit.topologies.link_graphs import Tree, balanced_tree, gossip_weights, spanning_tree, symmetric


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


@given(matrices(1, 7))
@settings(max_examples=60, deadline=None)
def test_a_balanced_tree_has_as_fast_a_slowest_link_but_for_a_class(rates: list[list[float]]) -> None:
    tree = balanced_tree(rates)
    assert sorted(tree.order()) == [*range(len(rates))]
    best = spanning_tree(rates).bottleneck(rates)
    assert tree.bottleneck(rates) >= best / 2**0.5 * (1 - 1e-9)


def test_equal_links_make_a_tree_of_few_children() -> None:
    for count in range(2, 20):
        tree = balanced_tree([[1e9] * count] * count)
        children = [tree.parents.count(rank) for rank in range(count)]
        assert max(children) <= 2
        assert tree.parents[:3] == (None, 0, 0)[:count]


def test_between_two_places_one_link_is_used() -> None:
    """Three ranks in each of two places, with a slow link between them: sums cross it once each way."""
    rates = [[1e9 if i // 3 == j // 3 else 1e7 for j in range(6)] for i in range(6)]
    crossing = [(a, b) for a, b in balanced_tree(rates).edges if a // 3 != b // 3]
    assert len(crossing) == 1


def test_a_tree_is_made_for_measured_links() -> None:
    links = LinkRates(((None, 1e7, 1e9), (1e7, None, 1e9), (1e9, 1e9, None)), ((0,), (1,), (2,)))
    assert LinkTree().needs_rates
    found = LinkTree().for_rates(links)
    assert found.parents == (2, 2, None)
    assert not found.needs_rates


@pytest.mark.parametrize("parents", [(0,), (1, 0), (None, None), (None, 5), (None, True), [None, 0], 3, "x"])
def test_what_is_no_tree_is_refused(parents: object) -> None:
    with pytest.raises(ConfigError, match="is no tree"):
        LinkTree(parents=parents)  # type: ignore[arg-type]


def test_a_tree_of_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 3 ranks, and there are 4"):
        LinkTree(parents=(None, 0, 0)).schedule(4, 100)
