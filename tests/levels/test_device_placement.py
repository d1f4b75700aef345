"""Where exchanges run, which groups and devices are refused, and what is said where memory ends."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import tacit
from tacit.algorithms import parse
from tacit.attaching import memory
from tacit.errors import AttachError, ConfigError
from tacit.kernels.dispatch import emulated_device
from tacit.levels.device_placement import HOST, Placement, check_backend, device_of, placed
from tacit.session import Session
from tacit.session.bucket_states import StateStore
from tacit.session.buckets import fitting
from tacit.transports.loopback import Loopback, LoopbackTransport
from tacit.transports.process_groups import backend_on

CPU, CUDA, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
NAMED = {"w": torch.zeros(30, 20), "b": torch.zeros(30)}


class Group:
    """A process group, as far as its backends are asked for."""

    def __init__(self, **backends: str) -> None:
        self._backends = backends

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(each) for each in self._backends]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: self._backends[device.type])


def on(device: torch.device, shape: tuple[int, ...] = (30, 20)) -> Any:
    """A tensor there, as far as it is asked where it is, and what it is like."""
    like = torch.zeros(shape)
    return SimpleNamespace(
        device=device,
        is_cpu=device.type == "cpu",
        shape=like.shape,
        dtype=like.dtype,
        numel=like.numel,
        dim=like.dim,
        ndim=like.ndim,
    )


# ---- devices and groups -------------------------------------------------------------------------------


def test_a_model_has_one_device() -> None:
    assert device_of({}) == CPU
    assert device_of(NAMED) == CPU
    assert device_of({"w": on(CUDA), "b": on(CUDA)}) == CUDA


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (
            {"w": on(CUDA), "b": on(SECOND), "c": on(CUDA)},
            r"\(w on cuda:0, b on cuda:1\), and a rank has one",
        ),
        ({"w": on(CUDA), "b": torch.zeros(3)}, r"several devices \(w on cuda:0, b on cpu\)"),
        (
            {"b": torch.zeros(3), "w": torch.zeros(3, device="meta")},
            r"w is on meta, .* model.to_empty\(device=",
        ),
        ({"w": on(torch.device("mps"))}, "w is on mps, .* move the model to the CPU or to a CUDA device"),
    ],
)
def test_other_devices_are_refused(named: Mapping[str, Tensor], says: str) -> None:
    with pytest.raises(AttachError, match=says):
        device_of(named)


def test_a_group_must_reach_the_models_device(world: dist.ProcessGroup) -> None:
    assert backend_on(world, CPU) == "gloo"
    assert backend_on(world, CUDA) == ""
    check_backend(world, CPU)
    with pytest.raises(
        AttachError, match=r'no backend for CUDA, only for cpu: write init_process_group\("nccl"'
    ):
        check_backend(world, CUDA)
    for backends in ({"cuda": "nccl"}, {"cpu": "gloo", "cuda": "gloo"}):
        check_backend(Group(**backends), CUDA)  # type: ignore[arg-type]


# ---- where exchanges run ------------------------------------------------------------------------------


def where(
    algorithm: str, wanted: str | None = None, named: Mapping[str, Tensor] = NAMED, **backends: str
) -> Placement:
    """As `attach` places the nearest level."""
    strategy = parse(algorithm).levels[0]
    policy = fitting(strategy.compressor, named)
    return placed(strategy, named, policy, Group(**(backends or {"cpu": "gloo"})), wanted)  # type: ignore[arg-type]


IN_STREAM = Placement(None, True, "on the GPU in stream order")
ON_DEVICE = [
    "dense",
    "topk:ratio=0.1",
    "dgc",
    "powersgd",
    "efsign",
    "qsgd",
    "pipesgd",
    "localsgd",
    "diloco:bits=4",
    "predictive",
    "threshold:tau=0.01",
    "gtopk:ratio=0.1",
    "gossip",
    "choco",
    "wagma",
    "uneven",
    "lag",
]
ON_HOST = {
    "oktopk": "OkTopK needs values on the host",
    "ps": "Star is on the host",
    "wnn": "Nowcast needs values on the host",
}


@pytest.mark.parametrize("algorithm", ON_DEVICE)
def test_what_asks_the_host_nothing_runs_in_stream_order(algorithm: str) -> None:
    assert where(algorithm) == Placement()
    with emulated_device():
        assert where(algorithm) == where(algorithm, "device") == IN_STREAM
        assert where(algorithm, HOST) == Placement(CPU, False, "on the host by gloo (as requested)")


@pytest.mark.parametrize("algorithm", ON_HOST)
def test_what_needs_the_host_runs_there_and_says_why(algorithm: str) -> None:
    with emulated_device():
        found = where(algorithm)
        assert (found.device, found.in_stream) == (CPU, False)
        assert ON_HOST[algorithm] in found.words
        with pytest.raises(
            AttachError, match=rf"not possible for '{algorithm}', as .*{ON_HOST[algorithm]}: leave"
        ):
            where(algorithm, "device")


@pytest.mark.parametrize("algorithm", ["fusion", "priority", "dear"])
def test_what_goes_layer_by_layer_is_refused_on_the_host(algorithm: str) -> None:
    with emulated_device():
        assert where(algorithm) == IN_STREAM
        with pytest.raises(AttachError, match="as the host was asked for: make the process group with NCCL"):
            where(algorithm, HOST)
    named = {"w": on(CUDA), "b": on(CUDA, (30,))}
    with pytest.raises(AttachError, match="as gloo is not NCCL: make"):
        where(algorithm, named=named, cuda="gloo")


def test_on_a_gpu_only_nccl_runs_in_stream_order() -> None:
    named = {"w": on(CUDA), "b": on(CUDA, (30,))}
    assert where("topk", named=named, cuda="nccl") == IN_STREAM
    assert (
        where("topk", named=named, cpu="gloo", cuda="gloo").words == "on the host by gloo (gloo is not NCCL)"
    )
    with pytest.raises(AttachError, match="'topk', as gloo is not NCCL"):
        where("topk", "device", named, cuda="gloo")


def test_a_model_on_the_cpu_is_exchanged_where_it_is() -> None:
    assert where("topk", HOST) == Placement()
    with pytest.raises(
        AttachError, match=r"is for a model on a GPU, and this one is on the CPU: leave it out"
    ):
        where("topk", "device")


@pytest.mark.parametrize("wanted", ["gpu", "", "cpu", True, 1])
def test_another_word_is_refused(wanted: Any) -> None:
    with pytest.raises(ConfigError, match="exchange_on"):
        where("topk", wanted)


def test_a_build_without_gloo_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with (
        emulated_device(),
        pytest.raises(AttachError, match=r"runs on the host.*, and this build of torch has no Gloo"),
    ):
        where("topk", HOST)


# ---- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ("dense", {}),
        ("topk:ratio=0.1", {"residual": 4 * 600}),
        ("dgc:ratio=0.1", {"residual": 4 * 600, "velocity": 4 * 630}),
        ("localsgd", {"anchor": 4 * 630, "delta": 4 * 630}),
        ("diloco", {"anchor": 4 * 630, "delta": 4 * 630, "momentum": 4 * 630}),
        ("ddp", {}),
    ],
)
def test_what_a_strategy_keeps(algorithm: str, expected: dict[str, int]) -> None:
    (strategy,) = parse(algorithm).levels
    assert memory.state_bytes(strategy, NAMED) == expected


def test_of_types_of_two_bytes_progress_is_kept_wide() -> None:
    (strategy,) = parse("localsgd").levels
    named = {name: x.bfloat16() for name, x in NAMED.items()}
    assert memory.state_bytes(strategy, named) == {"anchor": 4 * 630, "delta": 2 * 630}


@pytest.mark.parametrize("algorithm", ["topk:ratio=0.1", "dgc:ratio=0.1", "powersgd", "efsign"])
def test_a_session_keeps_as_much(algorithm: str) -> None:
    (strategy,) = parse(algorithm).levels
    session = Session(strategy, NAMED, LoopbackTransport(Loopback(2), 0), [[name] for name in NAMED])
    on_gpu = replace(session.context, in_stream=True)
    holdings: Any = StateStore(on_gpu, [[name] for name in NAMED])
    held = [x for state in holdings._states for x in state.values()]
    held += [x for each in holdings._workspaces for x in each.spares.values()]
    topologys = sum(x.numel() * 4 for (_, field), x in _state(session) if field.startswith("topology."))
    assert (
        sum(memory.state_bytes(strategy, NAMED).values())
        == sum(x.numel() * x.element_size() for x in held) - topologys
    )


def _state(session: Session) -> list[tuple[tuple[str, str], Tensor]]:
    return [(key, kept.tensor) for key, kept in session.store.named_state().items()]


def test_what_is_too_large_is_told_part_by_part() -> None:
    named = {"w": torch.zeros(2**20, 2, device="meta")}
    told = memory.too_large(parse("dgc"), named, None, None)
    assert "no room for what 'dgc' keeps beside a model of 8 MiB: velocity 8 MiB, residual 8 MiB, and" in told
    assert told.endswith(memory.HINT)
    assert "'qsgd'" in memory.too_large(parse("dgc"), named, None, HOST)
    assert ": little, and buffers" in memory.too_large(parse("dense"), named, None, None)
    levels = memory.too_large(parse("ednncomm:sync_every=2"), named, None, None)
    assert "anchor 8 MiB, delta 8 MiB" in levels


# ---- at attach ----------------------------------------------------------------------------------------


def model() -> tuple[DDP, torch.optim.SGD]:
    ddp = DDP(nn.Linear(20, 30))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


@pytest.mark.usefixtures("world")
def test_attach_hands_it_on() -> None:
    ddp, sgd = model()
    with pytest.raises(AttachError, match="is for a model on a GPU"):
        tacit.attach(ddp, sgd, "topk", exchange_on="device")
    with pytest.raises(ConfigError, match=r"unknown exchange_on 'gpu'\. Known: device, host"):
        tacit.attach(ddp, sgd, "topk", exchange_on="gpu")  # type: ignore[arg-type]
    with tacit.attach(ddp, sgd, "topk", exchange_on="host") as session:
        assert "on the host" not in session.active_path
    with emulated_device(), tacit.attach(ddp, sgd, "topk") as session:
        assert "gloo, on the GPU in stream order, kernels: " in session.active_path
    with emulated_device(), tacit.attach(ddp, sgd, "oktopk") as session:
        assert "gloo, on the host by gloo (OkTopK needs values on the host), " in session.active_path


@pytest.mark.usefixtures("world")
def test_no_room_is_told_by_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    ddp, sgd = model()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["tacit.attaching.assembly"], "kind_of", full)
        with pytest.raises(AttachError, match="the GPU has no room for what 'topk' keeps"):
            tacit.attach(ddp, sgd, "topk")
    with tacit.attach(ddp, sgd, "topk"):  # nothing is left of it
        pass


@pytest.mark.usefixtures("world")
def test_the_python_reducer_is_refused_where_gradients_are_exchanged() -> None:
    ddp, sgd = model()
    ddp._use_python_reducer = True
    with pytest.raises(AttachError, match=r"Python reducer.*optimize_ddp = \"ddp_optimizer\""):
        tacit.attach(ddp, sgd, "topk")
    with tacit.attach(ddp, sgd, "localsgd"):
        pass


@pytest.mark.usefixtures("world")
def test_a_backward_under_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp, sgd = model()
    bucket: Any = SimpleNamespace(buffer=lambda: SimpleNamespace(is_cuda=True), is_last=lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with tacit.attach(ddp, sgd, "topk") as session:
        door = session.levels[0].gradient
        assert door is not None
        with pytest.raises(AttachError, match=r"CUDA graph is being captured.*'topk'.*such as 'diloco'"):
            door(bucket)
