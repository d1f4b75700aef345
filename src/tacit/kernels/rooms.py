"""Memory that decoding needs and has no workspace for: kept by each thread, as large as it ever had to be."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE = 1 << 14
"""Entries that plain torch works on at a time where it needs a copy of them: 64 KiB of fp32."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device, int], Tensor] = {}


_KEPT = _Kept()


def room(key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numel` places, unspecified; the same ones whenever this thread asks by this key, on this stream."""
    if device.type == "meta":
        return torch.empty(numel, dtype=dtype, device=device)
    which = key, dtype, device, stream(device)
    kept = _KEPT.tensors.get(which)
    if kept is None or kept.numel() < numel:
        kept = _KEPT.tensors[which] = torch.empty(numel, dtype=dtype, device=device)
    return kept[:numel]


def stream(device: torch.device) -> int:
    """Which stream of the device is the current one: only what runs on one runs in order."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
