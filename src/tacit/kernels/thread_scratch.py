"""Scratch memory for decoding, which has no workspace: one for each thread, which grows as needed."""

from __future__ import annotations

import threading
from weakref import WeakSet

import torch
from torch import Tensor


class _Kept:
    """What one thread keeps."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.kept = _Kept()
        _OF_THREADS.add(self.kept)


_OF_THREADS: WeakSet[_Kept] = WeakSet()
_BUFFERS = _Buffers()


def all_scratch() -> list[Tensor]:
    """What all threads keep now."""
    return [tensor for kept in [*_OF_THREADS] for tensor in [*kept.tensors.values()]]


def thread_scratch(key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numel` entries of any value; the same memory for each call by this thread, key and CUDA stream."""
    if device.type == "meta":
        return torch.empty(numel, dtype=dtype, device=device)
    full_key = key, dtype, device, 0 if device.type == "cpu" else current_stream(device)
    kept = _BUFFERS.kept.tensors.get(full_key)
    if kept is None or kept.numel() < numel:
        kept = _BUFFERS.kept.tensors[full_key] = torch.empty(numel, dtype=dtype, device=device)
    return kept[:numel]


def current_stream(device: torch.device) -> int:
    """The device's current stream; 0 on the CPU. Only what runs on one stream runs in order."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
