"""One GPU and NCCL with one rank: streams, futures, what is waited for, and what comes out."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_training import (
    BY_ADAM,
    CUDA,
    ONLY_BY_ADAM,
    adamw,
    batches,
    flat,
    network,
    on,
    sgd,
    steps,
    trained,
    wrapped,
)
from host_sync import unsynchronized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tacit
from in_stream import IN_STREAM as EVERY
from tacit.errors import AttachError, NonFinite
from tacit_lab.study.graphed import GraphedGradients

pytestmark = pytest.mark.usefixtures("nccl")

GRADIENT = [
    "dense",
    "bf16",
    "fp16",
    "fp8",
    "topk:ratio=0.05",
    "topk:ratio=0.05,chunk=1000",
    "dgc:ratio=0.05",
    "randomk:ratio=0.1",
    "powersgd:rank=2",
    "efsign",
    "sign",
    "onebit",
    "qsgd",
    "terngrad",
    "int8",
    "natural",
    "stc",
    "signsgd",
    "pipesgd",
]
PROGRESS = [
    "localsgd:sync_every=3",
    "diloco:sync_every=3,bits=4",
    "streaming-diloco:sync_every=4,fragments=2,fragment_sync_delay=2,bits=4",
    "slowmo:sync_every=3",
    "easgd:sync_every=3",
    "overlap-localsgd:sync_every=3",
    "postlocal",
    "ednncomm:sync_every=2",
    "daso",
    "odsgd",
    "adacomm:sync_every=3",
    "qsr",
    "sparseloco:sync_every=3",
    "muloco:sync_every=3",
    "snoo:sync_every=3",
    "desloc:sync_every=3",
    "dilocox:sync_every=3",
    "lowbit",
    "predictive:sync_every=3",
]
HAVE_RUN = {text.partition(":")[0] for text in (*GRADIENT, *PROGRESS)}
NOT_RUN_YET = [
    text if not text.startswith("uneven") else "uneven"  # its rates are those of four ranks
    for text in EVERY
    if text.partition(":")[0] not in (*HAVE_RUN, *ONLY_BY_ADAM, "ddp")
]
"""All others: where these have passed, they belong to the lists above."""
LAYERWISE = ["fusion", "priority", "dear"]
"""They cannot be exchanged on the host."""
IN_STREAM = [*GRADIENT, *PROGRESS, *NOT_RUN_YET]
ON_HOST = ["wnn", "mp2"]
KNOWN = {"steps_per_epoch": 5, "epochs": 4}


def in_stream(algorithm: str, made: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> torch.Tensor:
    """The parameters after training on the GPU, on the CPU; `made`: the optimizer."""
    model = wrapped()
    optimizer = made(model)
    with tacit.attach(model, optimizer, algorithm, **KNOWN) as session:
        assert "on the GPU in stream order" in session.active_path
        steps(model, optimizer, on(CUDA, batches(10)), session.observe)
        numbers = session.metrics()
    assert numbers["rounds"] > 0
    return flat(model).cpu()


@pytest.mark.parametrize("algorithm", IN_STREAM)
def test_a_strategy_in_stream_order_gives_what_it_gives_on_the_cpu(algorithm: str) -> None:
    where = {} if algorithm in LAYERWISE else {"exchange_on": "host"}
    on_host = trained("dense" if where == {} else algorithm, **where, **KNOWN)
    # Matrices are multiplied alike; what differs is the order of sums in compressors, and random draws.
    assert (in_stream(algorithm) - on_host).abs().max() < (0.2 if "randomk" in algorithm else 2e-2)


@pytest.mark.parametrize("algorithm", BY_ADAM)
def test_with_adam_in_stream_order_and_on_the_host_as_on_the_cpu(algorithm: str) -> None:
    on_host = trained(algorithm, made=adamw, exchange_on="host", **KNOWN)
    # Where a gradient is nearly zero, Adam's step has the sign of what rounding left.
    assert (in_stream(algorithm, adamw) - on_host).abs().mean() < 1e-4


@pytest.mark.parametrize("algorithm", [each for each in (*IN_STREAM, *ON_HOST) if each not in LAYERWISE])
def test_a_strategy_on_the_host_gives_what_it_gives_on_the_cpu(algorithm: str) -> None:
    found = trained(algorithm, exchange_on="host", **KNOWN)
    assert found.isfinite().all()


@pytest.mark.parametrize("algorithm", ON_HOST)
def test_what_needs_the_host_says_so(algorithm: str) -> None:
    model = wrapped()
    with tacit.attach(model, optimizer := sgd(model), algorithm, **KNOWN) as session:
        assert "on the host by gloo (" in session.active_path
        steps(model, optimizer, on(CUDA, batches(4)), session.observe)
    with pytest.raises(AttachError, match="exchange_on='device' is not possible"):
        tacit.attach(model, optimizer, algorithm, exchange_on="device", **KNOWN)


@pytest.mark.parametrize("algorithm", LAYERWISE)
def test_layer_by_layer_on_the_host_is_refused(algorithm: str) -> None:
    model = wrapped()
    with pytest.raises(
        AttachError, match="in stream order, and that is not possible, as the host was asked for"
    ):
        tacit.attach(model, sgd(model), algorithm, exchange_on="host")


def test_dense_is_plain_ddp_to_the_bit() -> None:
    assert torch.equal(trained("dense"), trained("ddp"))


@pytest.mark.parametrize("algorithm", [*GRADIENT, *NOT_RUN_YET])
def test_a_step_waits_for_the_device_once(algorithm: str) -> None:
    """All of a step under torch's sync debug mode; what the optimizer's hook waits for is an event."""
    model = wrapped()
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm, **KNOWN):
        steps(model, optimizer, on(CUDA, batches(8)))
        data = on(CUDA, batches(3, seed=1))
        torch.cuda.synchronize()
        with unsynchronized():
            steps(model, optimizer, data)


@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.05", "powersgd", "efsign", "qsgd", "dgc"])
def test_a_nan_is_told_before_the_step(algorithm: str) -> None:
    model = wrapped()
    optimizer = sgd(model)
    session = tacit.attach(model, optimizer, algorithm, **KNOWN)
    steps(model, optimizer, on(CUDA, batches(5)))
    before = flat(model)
    handle = model.module[2].weight.register_hook(lambda g: g * math.nan)
    with pytest.raises(NonFinite, match=r"2\.weight"):
        steps(model, optimizer, on(CUDA, batches(1)))
    handle.remove()
    assert torch.equal(flat(model), before)
    session.close()


@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.05", "powersgd", "efsign", "int8"])
def test_with_a_scaler_an_overflow_is_passed_over(algorithm: str) -> None:
    model = wrapped()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cuda", init_scale=256.0, growth_interval=1000)
    with tacit.attach(model, optimizer, algorithm, scaler=scaler, **KNOWN) as session:
        for i, (x, y) in enumerate(on(CUDA, batches(8))):
            optimizer.zero_grad()
            before = flat(model)
            loss = nn.functional.cross_entropy(model(x), y) * (math.inf if i == 5 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(flat(model), before) == (i == 5)
        session.flush()
        assert session.metrics()["void_rounds"] == 1
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    "algorithm", ["topk:ratio=0.05", "powersgd", "dgc:ratio=0.05", "qsgd", "diloco:sync_every=3"]
)
def test_a_run_is_resumed(algorithm: str) -> None:
    def run(stops: bool) -> torch.Tensor:
        model = wrapped()
        optimizer = sgd(model)
        data = on(CUDA, batches(12))
        with tacit.attach(model, optimizer, algorithm, **KNOWN) as session:
            steps(model, optimizer, data[:6])
            saved = session.state_dict(), model.module.state_dict(), optimizer.state_dict()
            saved = torch.utils._pytree.tree_map(
                lambda x: x.clone() if isinstance(x, torch.Tensor) else x, saved
            )
            if not stops:
                steps(model, optimizer, data[6:])
                return flat(model)
        inner = network()
        inner.load_state_dict(saved[1])
        model = wrapped(inner)
        optimizer = sgd(model)
        optimizer.load_state_dict(saved[2])
        with tacit.attach(model, optimizer, algorithm, **KNOWN) as session:
            session.load_state_dict(saved[0])
            steps(model, optimizer, data[6:])
            return flat(model)

    assert torch.equal(run(stops=True), run(stops=False))


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler would like other sums
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("algorithm", ["dense", "topk:ratio=0.05", "diloco:sync_every=2"])
def test_a_compiled_model_trains_alike(algorithm: str, inside: bool) -> None:
    model = wrapped(torch.compile(network()) if inside else network(), bucket_cap_mb=25)
    optimizer = sgd(model)
    forward = model if inside else torch.compile(model)
    with tacit.attach(forward, optimizer, algorithm) as session:
        steps(forward, optimizer, on(CUDA, batches(6)), session.observe)
    # Compiled sums differ in the last bits, and then other entries are the largest.
    expected = trained(algorithm, 6, bucket_cap_mb=25)
    assert (flat(model).cpu() - expected).abs().max() < (2e-2 if "topk" in algorithm else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "algorithm", ["dense", "topk:ratio=0.05", "powersgd", "efsign", "int8", "diloco:sync_every=3"]
)
def test_types_of_two_bytes(algorithm: str, dtype: torch.dtype) -> None:
    model = wrapped(network(dtype=dtype))
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, algorithm) as session:
        assert "in stream order" in session.active_path
        steps(model, optimizer, [(x.to(dtype), y) for x, y in on(CUDA, batches(8))])
    assert flat(model).isfinite().all()


@pytest.mark.parametrize(
    "algorithm", ["dense", "int8", "topk:ratio=0.1", "powersgd:rank=1", "localsgd:sync_every=2"]
)
def test_a_sharded_model_of_one_rank(algorithm: str) -> None:
    mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("far", "near"))

    def run(where: str | None) -> torch.Tensor:
        model = network()
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["near"])
        optimizer = sgd(model)
        with tacit.attach(model, optimizer, algorithm, mesh=mesh, exchange_on=where) as session:
            assert ("in stream order" in session.active_path) == (where != "host")
            steps(model, optimizer, on(CUDA, batches(6)))
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]).cpu()

    assert (run(None) - run("host")).abs().max() < 2e-2


def test_the_gradients_of_several_networks_by_one_graph() -> None:
    networks = [network(), network()]
    for p in networks[1].parameters():
        p.data.mul_(0.5)
    data = batches(6)
    replay = GraphedGradients(networks, nn.functional.cross_entropy, data[:2])
    for first, second in zip(data[2::2], data[3::2], strict=True):
        losses = replay([first, second])
        for net, loss, (x, y) in zip(networks, losses, on(CUDA, [first, second]), strict=True):
            plain = nn.functional.cross_entropy(net(x), y)
            torch.testing.assert_close(loss, plain.detach())
            params = [*net.parameters()]
            for p, expected in zip(params, torch.autograd.grad(plain, params), strict=True):
                torch.testing.assert_close(p.grad, expected)


def test_batch_norm_statistics_travel_beside_parameters() -> None:
    model = wrapped(nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 5)).to(CUDA))
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "diloco:sync_every=2") as session:
        steps(model, optimizer, on(CUDA, batches(5)))
        session.sync()
    assert model.module[1].running_var.isfinite().all()
    assert dist.is_initialized()


def test_a_training_on_a_gpu_is_diagnosed() -> None:
    model = wrapped(network().to(CUDA))
    optimizer = sgd(model)
    with tacit.attach(model, optimizer, "dense") as session:
        diagnosing = session.diagnose(4)
        steps(model, optimizer, on(CUDA, batches(13)))
    found = diagnosing.result
    assert found is not None
    assert sum(found.parts.values()) == pytest.approx(found.seconds, rel=0.01)
    assert found.parts["computing"] > 0
    assert [note for note in found.notes if "processors only" in note]
