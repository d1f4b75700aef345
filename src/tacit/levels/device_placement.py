"""Where exchanges of a model on a GPU run: on the GPU in stream order, or on the host, from copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tacit import checks
from tacit.contracts import Compressor
from tacit.errors import AttachError, ConfigError
from tacit.kernels.dispatch import on_host
from tacit.session.buckets import Policy, choice
from tacit.strategy import Strategy
from tacit.torch_compat import device_types
from tacit.transports.by_device import ByDevice
from tacit.transports.process_groups import backend_on, gloo_is_built
from tacit.transports.torch_distributed import TorchTransport

HOST, DEVICE = "host", "device"
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Placement:
    """Where the exchanges of a level run.

    Attributes:
        device: the device of the exchanged buckets; None: that of the parameters.
        in_stream: whether they run on a GPU without the host waiting for them.
        words: the text for `active_path`; "" for a model on the CPU.
    """

    device: torch.device | None = None
    in_stream: bool = False
    words: str = ""


def device_of(named: Mapping[str, Tensor]) -> torch.device:
    """The device of the parameters.

    Raises:
        AttachError: they are on several, or on one that is neither a CPU nor a GPU.
    """
    for name, p in named.items():
        if p.device.type not in ("cpu", "cuda"):
            hint = {"meta": "give it memory first, by model.to_empty(device=...)"}.get(
                p.device.type, "move the model to the CPU or to a CUDA device"
            )
            raise AttachError(f"{name} is on {p.device}, and only CPU and CUDA are supported: {hint}")
    devices: dict[torch.device, str] = {}
    for name, p in named.items():
        devices.setdefault(p.device, name)
    if len(devices) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise AttachError(
            f"the model is on several devices ({where}), and a rank has one: put all of it on one device"
        )
    return next(iter(devices), _CPU)


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse a process group that cannot carry DDP's messages from the model's device.

    Raises:
        AttachError: the group has no backend for the device.
    """
    if device.type == "cuda" and not backend_on(group, device):
        raise AttachError(
            f"the model is on {device}, and the process group has no backend for CUDA, only for "
            f'{_kinds(group)}: write init_process_group("nccl"), or "gloo" where machines cannot reach each '
            "other by NCCL"
        )


def placed(
    strategy: Strategy,
    named: Mapping[str, Tensor],
    policy: Policy,
    group: dist.ProcessGroup,
    wanted: str | None,
) -> Placement:
    """Decide where the exchanges of a level run; `wanted`: "device" or "host" if the user has chosen.

    They run on the GPU if its backend launches collectives in stream order (NCCL) and neither compressors nor
    topology need a value on the host but by `Read`. Otherwise they run on the host, from copies made while
    the GPU computes.

    Raises:
        AttachError: the user has chosen the GPU, and that is not possible.
    """
    if strategy.subject == "nothing":
        return Placement()
    if wanted is not None:
        checks.one_of("exchange_on", wanted, (HOST, DEVICE))
    first = next(iter(named.values()), None)
    if first is None or on_host(first):
        if wanted == DEVICE:
            raise AttachError(
                "exchange_on='device' is for a model on a GPU, and this one is on the CPU: leave it out"
            )
        return Placement()
    why = "as requested" if wanted == HOST else _needs_host(strategy, named, policy, group, first.device)
    if not why:
        return Placement(None, True, "on the GPU in stream order")
    if wanted == DEVICE:
        raise AttachError(
            f"exchange_on='device' is not possible for {strategy.name!r}, as {why}: leave it out, and it "
            f"runs on the host while the GPU computes"
        )
    if strategy.overlap.layerwise:
        raise AttachError(
            f"{strategy.name!r} sends gradients from where they lie on the GPU, in stream order, and that is "
            f"not possible, as {'the host was asked for' if wanted == HOST else why}: make the process group "
            "with NCCL and leave exchange_on out, or attach 'dense', which goes by DDP's buckets"
        )
    if not gloo_is_built():
        raise AttachError(f"{strategy.name!r} runs on the host ({why}), and this build of torch has no Gloo")
    return Placement(_CPU, False, f"on the host by gloo ({why})")


def _needs_host(
    strategy: Strategy,
    named: Mapping[str, Tensor],
    policy: Policy,
    group: dist.ProcessGroup,
    device: torch.device,
) -> str:
    """The reason why exchanges cannot run in stream order; "": they can."""
    backend = backend_on(group, device)
    if device.type == "cuda" and backend != "nccl":
        return f"{backend} is not NCCL"
    return needs_host(strategy, named, policy)


def needs_host(strategy: Strategy, named: Mapping[str, Tensor], policy: Policy) -> str:
    """What of a level needs the host, whatever the backend; "": nothing does, so NCCL can have it."""
    try:
        chosen = dict.fromkeys(choice(name, p, policy) for name, p in named.items())
    except ConfigError:
        return "it fits no parameter"  # the session has a better error for that
    for each in chosen:
        if not each.on_device:
            return f"{type(_culprit(each)).__name__} needs values on the host"
    topology = strategy.topology.without_servers()  # with servers, it is `Star` by now
    if not topology.on_device:
        return f"{type(topology).__name__} is on the host"
    return ""


def _culprit(compressor: Compressor) -> Compressor:
    """The innermost compressor that needs values on the host."""
    inner = getattr(compressor, "inner", None)
    return _culprit(inner) if isinstance(inner, Compressor) and not inner.on_device else compressor


def transport_for(
    placing: Placement, group: dist.ProcessGroup, timeout: timedelta, nodes: Sequence[Sequence[int]]
) -> TorchTransport | ByDevice:
    """The transport for the placement of a level's exchanges."""
    if placing.in_stream:
        emulated = backend_on(group, torch.device("cuda")) != "nccl"
        host = TorchTransport(group, timeout, nodes, "gloo")
        device = TorchTransport(group, timeout, nodes, "gloo" if emulated else "nccl", in_order=True)
        return ByDevice(device, host)
    return TorchTransport(group, timeout, nodes, "gloo" if placing.words else "")


def _kinds(group: dist.ProcessGroup) -> str:
    return ", ".join(sorted(set(device_types(group))))
