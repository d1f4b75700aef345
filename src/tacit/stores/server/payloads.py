"""What a push holds: whether it is as it was declared, and how it is added to a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.contracts import Context, Payload, PayloadSpec, Workspace
from tacit.errors import PayloadError
from tacit.stores.messages import Message


class BufferWorkspace(Workspace):
    """A `contracts.Workspace` that allocates each buffer when it is first asked for, and keeps it."""

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self.scratch(f"spare {field}", like, like.shape, like.dtype)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        buffer = self._scratch.get(key)
        if buffer is None or buffer.shape != torch.Size(shape) or buffer.dtype != dtype:
            buffer = self._scratch[key] = torch.empty(tuple(shape), dtype=dtype, device=like.device)
        return buffer

    def context(self, out: Tensor, name: str, round: int) -> Context:
        """The context of an encoding of the server's; its random numbers differ from those of all workers."""
        return Context(out=out, work=self, peers=1, round=round, name=f"server/{name}")


def check_payloads(push: Message) -> None:
    """Refuse payloads of another size or type than their format has.

    Raises:
        PayloadError: names what was received, and what was expected.
    """
    if len(push.payloads) != len(push.pieces):
        raise PayloadError(
            f"a push of {len(push.payloads)} payloads, of which {len(push.pieces)} were declared"
        )
    for payload, piece in zip(push.payloads, push.pieces, strict=True):
        if piece.codec is not None:
            piece.codec.check(payload, torch.empty(piece.numel, dtype=piece.dtype, device="meta"))
        elif len(payload) != 1 or payload[0].numel() != piece.numel or payload[0].dtype != piece.dtype:
            there = ", ".join(f"{part.numel()} of {part.dtype}" for part in payload)
            raise PayloadError(f"a push holds {there}, and {piece.numel} of {piece.dtype} were expected")


def check_entries(push: Message, numel: int) -> None:
    """Refuse a push of entries that a bucket of `numel` entries does not have.

    Raises:
        PayloadError: names them.
    """
    for piece in push.pieces:
        fits = piece.numel == numel if piece.spans is None else all(b <= numel for _, b in piece.spans)
        if not fits:
            raise PayloadError(f"a push is about {piece.numel} entries, and the bucket has {numel}")


def add_(push: Message, out: Tensor, weight: float) -> None:
    """Add `weight` times a decoded push to the bucket `out`; nothing, if a part of it cannot be decoded.

    Raises:
        PayloadError: names that part.
    """
    beside = [
        (payload, piece) for payload, piece in zip(push.payloads, push.pieces, strict=True) if piece.spans
    ]
    parts = [_decoded(payload, piece, weight) for payload, piece in beside]
    before = [[out[a:b].clone() for a, b in piece.spans or ()] for _, piece in beside]
    for payload, piece in zip(push.payloads, push.pieces, strict=True):
        if piece.spans is None:
            _add_piece_(payload, piece, out, weight)
    for (_, piece), part, olds in zip(beside, parts, before, strict=True):
        news = torch.split(part, [b - a for a, b in piece.spans or ()])
        for (a, b), old, new in zip(piece.spans or (), olds, news, strict=True):
            torch.add(old, new, out=out[a:b])  # one bit cannot encode zero


def _decoded(payload: Payload, piece: PayloadSpec, weight: float) -> Tensor:
    part = torch.zeros(piece.numel, dtype=piece.dtype)
    _add_piece_(payload, piece, part, weight)
    return part


def _add_piece_(payload: Payload, piece: PayloadSpec, out: Tensor, weight: float) -> None:
    if piece.codec is None:
        out.add_(payload[0].view_as(out), alpha=weight)
    else:
        piece.codec.decode_add_(payload, out, weight)
