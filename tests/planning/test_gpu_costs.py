"""What strategies cost on a GPU: by events in its stream, the same path as there, and a made clock."""

from dataclasses import replace

import made_training as made
import pytest
import torch
from made_gpu import LAUNCH, made_gpu

from tacit.algorithms import parse
from tacit.errors import ConfigError
from tacit.planning.profile import GpuProfile, Profile, StrategyCost
from tacit.planning.simulation.rehearsal import rehearse
from tacit.planning.strategy_costs import measured_cost


def profile(in_stream: bool = True) -> Profile:
    return replace(made.profile(), gpu=GpuProfile("a made GPU", True, in_stream, 1e10, 1e10))


def measured(text: str, nodes: int = 4, ranks: int = 1, in_stream: bool = True) -> StrategyCost:
    tensors = {name: torch.ones(shape) for name, shape in made.SHAPES.items()}
    with made_gpu():
        return measured_cost(parse(text), profile(in_stream), nodes, ranks, tensors)


@pytest.mark.parametrize("text", ["dense", "bf16", "int8", "topk", "powersgd", "efsign", "dgc", "qsgd"])
def test_segments_are_the_gpus_and_launching_the_hosts(text: str) -> None:
    cost = measured(text)
    (script,) = rehearse(parse(text), profile(), 4, 1)
    assert script.on_gpu
    (level,) = cost.levels
    for bucket, told in zip(level.buckets, script.buckets, strict=True):
        assert len(bucket.segments) == len(told.messages) + 1
        assert sum(bucket.segments) > 0
        launches = bucket.launching / LAUNCH
        assert launches == pytest.approx(round(launches))
        assert launches > 3
    assert measured(text) == cost, "the clocks are made, so it is the same again"


def test_what_the_echo_does_is_in_no_segment() -> None:
    few, many = (measured("topk", nodes).levels[0].buckets[-1] for nodes in (2, 8))
    assert few.segments[0] == pytest.approx(many.segments[0], rel=1e-3), "encoding is of one rank's entries"
    assert few.segments[1] < many.segments[1], "decoding does"


@pytest.mark.parametrize("text", ["localsgd", "diloco", "streaming-diloco"])
def test_deltas_are_measured_with_their_reading_and_applying(text: str) -> None:
    (level,) = measured(text).levels
    assert level.main > 0
    assert level.kept_bytes >= profile().model_bytes


def test_a_strategy_by_nodes_has_the_cost_of_its_turns() -> None:
    assert all(each.launching > 0 for each in measured("ednncomm", 2, 2).levels[0].buckets)


def test_on_the_host_a_processors_time_is_measured() -> None:
    (level,) = measured("topk", in_stream=False).levels
    assert all(each.launching == 0 for each in level.buckets)
    (script,) = rehearse(parse("topk"), profile(in_stream=False), 4, 1)
    assert not script.on_gpu
    assert rehearse(parse("ddp"), profile(in_stream=False), 4, 1)[0].on_gpu, "NCCL is DDP's all the same"


def test_without_the_training_there_is_no_gpu_to_measure_on() -> None:
    with pytest.raises(ConfigError, match="tacit profile --algorithms topk -- SCRIPT"):
        measured_cost(parse("topk"), profile(), 4, 1)
