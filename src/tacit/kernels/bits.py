"""Signs in single bits: pack, and unpack-and-add.

The layout is planar: with m = ceil(n / 8) bytes, bit j of byte i holds entry j * m + i, so that packing is
plain element-wise work on eight long vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Bytes worked on at a time: eight such planes of entries stay in the second-level cache."""


def pack_signs(x: Tensor, bits: Tensor) -> None:
    """Write one bit an entry of the flat `x` to `bits` (uint8, ceil(n / 8)): 1 where x >= 0."""
    if x.is_meta:
        return
    size = bits.numel()
    planes = [x[start : start + size] for start in range(0, x.numel(), size)]
    for start in range(0, size, BLOCK):
        byte = bits[start : start + BLOCK].zero_()
        for j, plane in enumerate(planes):
            piece = plane[start : start + BLOCK]
            byte[: piece.numel()] |= piece.ge(0).view(torch.uint8) << j


def add_signs_(bits: Tensor, magnitude: float, out: Tensor) -> None:
    """Add +-`magnitude` to every entry of the flat `out`, by the signs in `bits`."""
    size = bits.numel()
    planes = [out[start : start + size] for start in range(0, out.numel(), size)]
    for start in range(0, size, BLOCK):
        byte = bits[start : start + BLOCK]
        for j, plane in enumerate(planes):
            piece = plane[start : start + BLOCK]
            piece.add_((byte[: piece.numel()] >> j) & 1, alpha=2 * magnitude).sub_(magnitude)
