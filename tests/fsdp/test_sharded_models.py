"""Models that FSDP2 shards, on real processes over Gloo; all checks in one launch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_setup_checks import CHECKS

from rank_processes import Ended, assert_passed, ranks
from tacit.algorithms import parse
from tacit.attaching.failures import Failures
from tacit.errors import AttachError
from tacit.fsdp.gradients import ShardedGradients
from tacit.fsdp.model import _check_placed, far_level

WORLD = 4


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return ranks("sharded_setup_checks.py", WORLD)


@pytest.mark.parametrize("name", CHECKS)
def test_on_gloo(name: str, ended: list[Ended]) -> None:
    assert_passed(name, ended)


def test_the_ranks_end_well(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * WORLD


def test_what_is_offloaded_to_the_cpu_is_refused() -> None:
    """As it would be on a GPU: the mesh is of one, and the parameter is not there."""
    p: Any = SimpleNamespace(
        device=torch.device("cpu"), device_mesh=SimpleNamespace(ndim=1, device_type="cuda")
    )
    with pytest.raises(
        AttachError, match=r"w is on cpu, and its mesh is for cuda \(CPU offload\).*leave offload_policy out"
    ):
        _check_placed("w", p)


def test_exchanges_that_wait_for_the_device_are_settled_before_a_mean_is_waited_for() -> None:
    """Where FSDP2 adds or converts a module's gradient at once, before the last bucket has left."""
    calls = []
    model: Any = SimpleNamespace(module=torch.nn.Linear(2, 2))
    unused: Any = None
    gradients = ShardedGradients(model, {}, unused, "mean", lambda: calls.append("settle"))
    future: Any = SimpleNamespace(wait=lambda: calls.append("wait"))
    gradients._landing.append((future, torch.zeros(2)))
    gradients._land()
    assert calls == ["settle", "wait"]


def test_an_average_by_node_is_refused_in_the_words_of_a_text() -> None:
    with pytest.raises(AttachError, match="leave its topology out; or write topology=all-gather in a text"):
        far_level(parse("topk:topology=hierarchical"), 4)


def test_whoever_waits_for_ranks_with_other_meshes_says_what_its_own_is() -> None:
    """Ranks then wait for others than wait for them, and no message passes by which they could compare."""
    spec: Any = SimpleNamespace(sharded=SimpleNamespace(shards=3))
    unused: Any = None
    assert "call with one mesh, here of 3 shards a replica: " in Failures(spec, [], unused, None)._doing
