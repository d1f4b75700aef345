"""Strategies rehearsed on meta tensors: DDP's buckets, and the messages of a real session."""

import made_training as made
import pytest
import torch
import torch.distributed as dist

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.planning.cluster_prediction import refuse
from tacit.planning.profile import Profile
from tacit.planning.simulation.costs import cost_on
from tacit.planning.simulation.rehearsal import ddp_buckets, rehearse
from tacit.planning.strategy_costs import measured_cost
from tacit_lab.cluster_plans import every_algorithm, layouts


def predictable() -> list[str]:
    found = []
    for text in every_algorithm():
        try:
            refuse(parse(text))
        except ConfigError:
            continue
        found.append(text)
    return found


@pytest.mark.parametrize("bucket_bytes", [1_000, 30_000, 10**6])
def test_buckets_are_those_that_ddp_forms_from_the_second_step_on(bucket_bytes: int) -> None:
    profile = made.profile(bucket_bytes=bucket_bytes)
    ready = sorted(profile.step.parameters, key=lambda each: each.ready)
    tensors = [torch.empty(each.shape) for each in ready]
    limits = [bucket_bytes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)  # type: ignore[attr-defined]
    assert ddp_buckets(profile) == [[ready[i].name for i in bucket] for bucket in theirs]


def test_the_first_bucket_is_small_where_the_cap_is_torchs_own() -> None:
    parameters = tuple(made.ParamReady(f"p{i}", (200_000,), "float32", float(i)) for i in range(6))
    step = made.StepProfile(0, 0, 6, 0, parameters)
    profile = Profile(step, 25 << 20, 1, 1, 1, 0, 0, 0, 0)
    assert [len(bucket) for bucket in ddp_buckets(profile)] == [2, 4]


FEW = ("topk", "diloco", "ednncomm:sync_every=4", "dear")
"""One of each way in which messages leave."""


@pytest.mark.parametrize("algorithm", FEW)
def test_what_is_measured_has_the_messages_that_are_rehearsed(algorithm: str) -> None:
    same_messages(algorithm)


@pytest.mark.parametrize("algorithm", [each for each in predictable() if each not in FEW])
def test_so_it_is_with_all_others(algorithm: str) -> None:
    same_messages(algorithm)


def same_messages(algorithm: str) -> None:
    profile = made.profile()
    for nodes, ranks in ((4, 1), (2, 2)):
        scripts = rehearse(parse(algorithm), profile, nodes, ranks)
        cost = measured_cost(parse(algorithm), profile, nodes, ranks)
        for script, level in zip(scripts, cost.levels, strict=True):
            rehearsed = [(each.numel, len(each.messages) + 1) for each in script.buckets]
            assert [(each.numel, len(each.segments)) for each in level.buckets] == rehearsed
            assert all(segment >= 0 for each in level.buckets for segment in each.segments)


def test_a_variance_that_is_kept_takes_the_memory_of_a_model() -> None:
    profile = made.profile()
    kept, other = (
        measured_cost(parse(text), profile, 4, 1).levels[-1].kept_bytes
        for text in ("zeroone-adam", "lowbit:bits=2,variance=local")
    )
    assert kept - other == profile.model_bytes


def crossing(algorithm: str, nodes: int, ranks: int) -> int:
    levels = rehearse(parse(algorithm), made.profile(), nodes, ranks)
    return sum(each.crossing for level in levels for bucket in level.buckets for each in bucket.messages)


def test_a_ring_leaves_each_node_once() -> None:
    size = made.profile().model_bytes
    assert crossing("dense", 4, 1) == pytest.approx(2 * 3 / 4 * size, abs=8)
    assert crossing("dense", 2, 2) == pytest.approx(2 * 3 / 4 * size, abs=8)
    assert crossing("dense", 1, 4) == 0


def test_slices_and_turns_of_a_node_cross_once() -> None:
    size = made.profile().model_bytes
    slices, turns = (f"ednncomm:sync_every=4,by={by}" for by in ("slices", "turns"))
    for text in (slices, turns):
        levels = rehearse(parse(text), made.profile(), 2, 2)
        far = sum(each.crossing for bucket in levels[-1].buckets for each in bucket.messages)
        assert far == pytest.approx(size, abs=16), text
        assert sum(each.crossing for bucket in levels[0].buckets for each in bucket.messages) == 0


def test_a_cost_of_a_larger_cluster_is_on_the_line_of_two_smaller_ones() -> None:
    four = made.with_cost(made.profile(), "topk", 4, 1, each=0.001)
    both = made.with_cost(four, "topk", 8, 1, each=0.003)
    found = cost_on(both, "topk", 16, 1)
    assert [segment for each in found.levels[0].buckets for segment in each.segments] == pytest.approx(
        [0.007] * 4
    )
    assert layouts(16, 1) == [(4, 1), (8, 1)]


def test_a_cost_that_nobody_has_measured_is_an_error_with_the_command() -> None:
    with pytest.raises(ConfigError, match=r"tacit profile --algorithms topk .*--layout 4x1,4x2,8x2"):
        cost_on(made.with_cost(made.profile(), "topk", 4, 1), "topk", 16, 2)
