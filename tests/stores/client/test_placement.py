"""How a model is cut for servers: so that what goes to one and what comes from it overlap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tacit.algorithms import parse
from tacit.stores.client.placement import cut_by_server, homes, message_cap
from tacit.strategy import Strategy

BUCKET = 25 << 20
MODEL = {f"{i:02}": torch.empty(500_000, device="meta") for i in range(50)}


def buckets(text: str, servers: int, tensors: dict[str, Tensor] = MODEL) -> dict[int, list[int]]:
    """The bytes of the lots of each server."""
    (strategy,) = parse(text).levels
    assert isinstance(strategy, Strategy)
    home = homes(tensors, servers)
    cap = message_cap(strategy, tensors, servers, 4, BUCKET)
    cut = cut_by_server([*tensors], tensors, home, cap)
    assert sorted(name for bucket in cut for name in bucket) == sorted(tensors), (
        "each parameter in one bucket"
    )
    assert all(len({home[name] for name in bucket}) == 1 for bucket in cut), "a bucket has one home"
    return {
        server: [
            sum(4 * tensors[name].numel() for name in bucket) for bucket in cut if home[bucket[0]] == server
        ]
        for server in range(servers)
    }


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("text", ["ps", "ps-async", "ps-async:push=topk", "ps:push=sign"])
def test_a_server_has_many_lots_of_much_data(text: str, servers: int) -> None:
    for sizes in buckets(text, servers).values():
        assert len(sizes) >= 12, "so that answers leave while pushes arrive"
        assert abs(sum(sizes) - 100_000_000 / servers) <= 2_000_000


@pytest.mark.parametrize(
    ("text", "least"),
    [("ps-topk:ratio=0.01", 12_000_000), ("ps-dgc", 24_000_000), ("ps:push=int8", 6_000_000)],
)
def test_what_is_small_by_compression_is_cut_into_fewer(text: str, least: int) -> None:
    assert max(buckets(text, 1)[0]) >= least


def test_small_models_are_not_cut_to_crumbs() -> None:
    few = {f"{i:02}": torch.empty(10_000, device="meta") for i in range(50)}
    assert len(buckets("ps", 1, few)[0]) == 2
    assert len(buckets("ps", 1, {"a": torch.empty(9, device="meta")})[0]) == 1


def test_a_large_parameter_is_a_lot() -> None:
    model = {"a": torch.empty(5_000_000, device="meta"), "b": torch.empty(9, device="meta")}
    assert buckets("ps", 2, model) == {0: [20_000_000], 1: [36]}
