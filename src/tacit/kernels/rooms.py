"""Memory that decoding needs and has no workspace for: kept by each thread, as large as it ever had to be."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

PIECE = 1 << 14
"""Entries that plain torch works on at a time where it needs a copy of them: 64 KiB of fp32."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_KEPT = _Kept()


def room(key: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`numel` places, unspecified; the same ones whenever this thread asks by this key."""
    if device.type == "meta":
        return torch.empty(numel, dtype=dtype, device=device)
    which = key, dtype, device
    kept = _KEPT.tensors.get(which)
    if kept is None or kept.numel() < numel:
        kept = _KEPT.tensors[which] = torch.empty(numel, dtype=dtype, device=device)
    return kept[:numel]
