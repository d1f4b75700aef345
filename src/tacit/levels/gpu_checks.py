"""What can be wrong with a rank's GPU, in words of what to write instead."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from tacit.transports.process_groups import backend_on

LEAST_NCCL = (2, 18)
"""The first with the calls by which torch makes a second communicator out of one."""
NCCL_OF_MIG = (2, 32)
"""The first whose documentation knows MIG instances: Creating a Communicator, Using MIG instances."""


def unfit(device: torch.device, device_ids: Sequence[int] | None, group: dist.ProcessGroup) -> Iterator[str]:
    """What is wrong with the GPU on which a rank's model is.

    Args:
        device: of the model's parameters.
        device_ids: those that DDP was given, if it was.
        group: the model's.
    """
    here = torch.cuda.current_device()
    if device_ids and device_ids[0] != device.index:
        yield (
            f"DistributedDataParallel has device_ids={[*device_ids]}, to which it moves what forward gets, "
            f"and the model is on {device}: write device_ids=[{device.index}], or leave it out"
        )
    if here != device.index:
        yield (
            f"the model is on {device}, and this process' current device is cuda:{here}, on which kernels "
            f"would be launched: write torch.cuda.set_device({device.index}) before you make the model"
        )
    if torch.cuda.is_current_stream_capturing():
        yield "attach was called while a CUDA graph is being captured: attach before the capture begins"
    if backend_on(group, device) != "nccl" or group.size() == 1:
        return
    version, instead = nccl_version(), 'init_process_group("gloo"), which exchanges on the host'
    text = ".".join(map(str, version))
    if version < LEAST_NCCL:
        yield (
            f"NCCL {text} is loaded, and tacit needs 2.18 or a later one: install the nvidia-nccl that your "
            f"torch asks for, and unset LD_PRELOAD if that names another; or write {instead}"
        )
    name = torch.cuda.get_device_name(device)
    if " MIG " in name and version < NCCL_OF_MIG:
        yield (
            f"{device} is an instance of a divided GPU ({name}), and NCCL knows these from 2.32 on, while "
            f"{text} is loaded: give each rank a whole GPU, or write {instead}"
        )


def nccl_version() -> tuple[int, ...]:
    """Of the library that is loaded, such as (2, 28, 9); torch tells the one it was built with."""
    ask = getattr(ctypes.CDLL(None), "ncclGetVersion", None)
    if ask is None:  # nothing was preloaded, and torch keeps its own to itself
        built: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return built[:3]
    found = ctypes.c_int()
    ask(ctypes.byref(found))
    return found.value // 10_000, found.value // 100 % 100, found.value % 100
