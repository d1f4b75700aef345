"""Whether a payload is one that this rank's compressor would send: by sizes and types, not by its bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.errors import PayloadError

SignPayload = tuple[Tensor, Tensor, Tensor | None]
"""Bits, highs, and lows where they are not the highs negated. A single high counts for all blocks."""
FORMAT = 5
"""Of all payloads' bytes, and of their places in a message; ranks compare it when they attach.

One more when any of these change.
"""


def expect(tensor: Tensor, what: str, numel: int, dtype: torch.dtype, entries: int) -> None:
    """Refuse a part of a payload that has another size or type than those for so many entries.

    Raises:
        PayloadError: names what was received, and what was expected.
    """
    if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous():
        given = f"{tensor.numel() * tensor.element_size()} bytes of {tensor.dtype}"
        shape = "" if tensor.is_contiguous() else ", not contiguous"
        raise PayloadError(
            f"a payload for {entries} entries has {given}{shape} as {what}, where {numel * dtype.itemsize} "
            f"bytes of {dtype} are expected: its sender has another compressor, another version of tacit, or "
            "the payload is not whole"
        )


def expect_parts(payload: Sequence[Tensor], entries: int, *parts: tuple[str, int, torch.dtype]) -> None:
    """`expect`, of each part: (what, numel, dtype).

    Raises:
        PayloadError: a part is missing, too many, or of another size or type.
    """
    if len(payload) != len(parts):
        names = ", ".join(what for what, *_ in parts)
        raise PayloadError(
            f"a payload for {entries} entries has {len(payload)} parts, where {len(parts)} are expected "
            f"({names}): its sender has another compressor, or another version of tacit"
        )
    for tensor, (what, numel, dtype) in zip(payload, parts, strict=True):
        if tensor.numel() != numel or tensor.dtype != dtype or not tensor.is_contiguous():
            expect(tensor, what, numel, dtype, entries)  # which raises the error
