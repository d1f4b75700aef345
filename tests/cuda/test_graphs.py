"""CUDA graphs on one GPU: what works beside a session, and what is refused."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from gpu_training import CUDA, batches, flat, network, on, sgd, steps, trained, wrapped
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.errors import AttachError

T = TypeVar("T")
pytestmark = pytest.mark.usefixtures("nccl")


def on_a_side(side: torch.cuda.Stream, call: Callable[[], T]) -> T:
    """What it returns, launched on a stream of its own, as torch's notes on CUDA graphs ask of DDP."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = call()
    torch.cuda.current_stream().wait_stream(side)
    return found


def captured(model: DDP, side: torch.cuda.Stream, x: Tensor, y: Tensor) -> torch.cuda.CUDAGraph:
    """Forward and backward; a replay leaves gradients where DDP has its buckets."""

    def once() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    def warm_up() -> None:
        for _ in range(11):
            once()

    on_a_side(side, warm_up)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        once()
    return graph


@pytest.mark.parametrize("algorithm", ["localsgd:sync_every=3", "diloco:sync_every=3,bits=4"])
def test_rounds_come_beside_a_captured_step(algorithm: str) -> None:
    data = on(CUDA, batches(10))
    x, y = (each.clone() for each in data[0])
    side = torch.cuda.Stream()
    model = on_a_side(side, wrapped)
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        graph = captured(model, side, x, y)
        for here, there in data:
            x.copy_(here)
            y.copy_(there)
            graph.replay()
            optimizer.step()
        assert session.metrics()["rounds"] == 3
    assert (flat(model).cpu() - trained(algorithm)).abs().max() < 1e-4


def test_to_capture_a_backward_whose_gradients_travel_is_refused() -> None:
    ((x, y),) = data = on(CUDA, batches(1))
    side = torch.cuda.Stream()
    model = on_a_side(side, wrapped)
    optimizer = sgd(model)
    tacit.attach(model, optimizer, "topk:ratio=0.05")
    on_a_side(side, lambda: steps(model, optimizer, data * 11))
    with (
        pytest.raises((AttachError, RuntimeError)) as raised,
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=side),
    ):
        nn.functional.cross_entropy(model(x), y).backward()
    errors: list[BaseException] = [raised.value]
    while errors[-1].__context__ is not None:
        errors.append(errors[-1].__context__)
    assert any("a CUDA graph is being captured" in str(each) for each in errors), errors


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch captures on another one
@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.05", "diloco:sync_every=2"])
def test_layers_that_are_graphs_train_alike(algorithm: str) -> None:
    """`make_graphed_callables` inside DDP: backward replays a graph, and DDP calls its hook behind it."""
    x, _ = on(CUDA, batches(1))[0]
    layers = torch.cuda.make_graphed_callables(network(), (x,))
    model = wrapped(layers)
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        steps(model, optimizer, on(CUDA, batches(6)), session.observe)
    assert (flat(model).cpu() - trained(algorithm, 6)).abs().max() < (2e-2 if "topk" in algorithm else 1e-4)


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.05", "powersgd", "diloco:sync_every=2"])
def test_a_model_compiled_into_graphs_trains_alike(algorithm: str) -> None:
    model = wrapped(torch.compile(network(), mode="reduce-overhead"), bucket_cap_mb=25)
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        steps(model, optimizer, on(CUDA, batches(8)), session.observe)
    expected = trained(algorithm, 8, bucket_cap_mb=25)
    assert (flat(model).cpu() - expected).abs().max() < (2e-2 if "topk" in algorithm else 1e-3)
