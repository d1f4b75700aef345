"""What is said of a GPU that does not fit, by calls of torch.cuda that are replaced."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_device_placement import Group
from torch import nn

import tacit
from tacit.attaching import requirements
from tacit.errors import AttachError
from tacit.levels import gpu_checks
from tacit.levels.gpu_checks import nccl_version, unfit

SECOND = torch.device("cuda", 1)
MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


class Cuda:
    """Answers of torch.cuda; what is not asked for here is an error."""

    def __init__(self, patch: pytest.MonkeyPatch, **answers: object) -> None:
        known = {
            "current_device": 1,
            "is_current_stream_capturing": False,
            "get_device_name": "NVIDIA H100 80GB HBM3",
            **answers,
        }
        for name in ("current_device", "is_current_stream_capturing", "get_device_name"):
            patch.setattr(torch.cuda, name, lambda *_, answer=known[name]: answer)
        patch.setattr(gpu_checks, "nccl_version", lambda: known.get("nccl", (2, 28, 9)))


def said(
    patch: pytest.MonkeyPatch,
    device_ids: Sequence[int] | None = None,
    ranks: int = 4,
    backend: str = "nccl",
    **answers: object,
) -> list[str]:
    Cuda(patch, **answers)
    group: Any = Group(cuda=backend)
    group.size = lambda: ranks
    return [*unfit(SECOND, device_ids, group)]


def test_a_gpu_that_fits_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(monkeypatch) == said(monkeypatch, [1]) == []
    assert said(monkeypatch, nccl=(2, 17, 1), ranks=1) == []  # nothing is sent
    assert said(monkeypatch, nccl=(2, 17, 1), get_device_name=MIG, backend="gloo") == []
    assert said(monkeypatch, nccl=(2, 32, 3), get_device_name=MIG) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device_ids": [0]}, "has device_ids=[0], to which it moves what forward gets, and the model is on"),
        ({"device_ids": [0]}, "cuda:1: write device_ids=[1], or leave it out"),
        (
            {"current_device": 0},
            "current device is cuda:0, on which kernels would be launched: write torch.c",
        ),
        ({"current_device": 0}, "torch.cuda.set_device(1) before you make the model"),
        ({"is_current_stream_capturing": True}, "while a CUDA graph is being captured: attach before"),
        ({"nccl": (2, 17, 1)}, "NCCL 2.17.1 is loaded, and tacit needs 2.18 or a later one: install"),
        ({"get_device_name": MIG}, f"({MIG}), and NCCL knows these from 2.32 on, while 2.28.9 is loaded"),
        ({"get_device_name": MIG}, 'give each rank a whole GPU, or write init_process_group("gloo"), which'),
    ],
)
def test_what_does_not_fit_is_said(given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (why,) = said(monkeypatch, **given)
    assert says in why


@pytest.mark.usefixtures("world")
def test_attach_asks_with_the_device_ids_of_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(device: torch.device, device_ids: object, group: object) -> list[str]:
        asked.append((device, device_ids))
        return ["it does not fit: take another"]

    monkeypatch.setattr(gpu_checks, "unfit", found)
    monkeypatch.setattr(requirements, "device_of", lambda _: SECOND)
    monkeypatch.setattr(requirements, "check_backend", lambda *_: None)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    model.device_ids = [3]
    with pytest.raises(AttachError, match="it does not fit: take another"):
        tacit.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk")
    assert asked == [(SECOND, [3])]


@pytest.mark.parametrize(("told", "version"), [(21701, (2, 17, 1)), (22809, (2, 28, 9)), (23203, (2, 32, 3))])
def test_the_version_is_that_of_the_library_which_is_loaded(
    told: int, version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        @staticmethod
        def ncclGetVersion(found: Any) -> None:
            found._obj.value = told

    monkeypatch.setattr(gpu_checks.ctypes, "CDLL", lambda _: Library)
    assert nccl_version() == version
    monkeypatch.setattr(gpu_checks.ctypes, "CDLL", lambda _: object)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5, "+suffix"))
    assert nccl_version() == (2, 27, 5)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("algorithm", ["diloco", "topk"])
def test_a_step_under_graph_capture_is_refused(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tacit.attach(model, optimizer, algorithm) as session:
        model(torch.ones(1, 4)).sum().backward()
        seen = session._active.hooks._seen
        assert seen is not None
        monkeypatch.setattr(seen, "_on_gpu", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            AttachError, match=r"SGD.step is called while a CUDA graph .* and call step after"
        ):
            optimizer.step()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.step()
