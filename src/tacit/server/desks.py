"""What the services of a server have in common: what they are sent, and what they know of each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tacit.contracts import Context, Message, Payload, PayloadSpec, Sender
from tacit.errors import PayloadError, ServerLost

# ---- what a service is sent ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Push:
    """What a worker has for the server, and how it wants to hear of the others'.

    Attributes:
        payloads: one for each of `pieces`.
        pulls: how the answer is to be said.
        lr: the worker's learning rate.
    """

    payloads: tuple[Payload, ...]
    pieces: tuple[PayloadSpec, ...]
    pulls: tuple[PayloadSpec, ...]
    lr: float = 0.0


@dataclass(frozen=True, slots=True)
class Enter:
    """A worker begins, or comes back; `offer`: the parameters it begins with, if it was asked for them."""

    offer: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Meet:
    """A worker has nothing more to push for now, and waits until no other has."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A worker is no more, or has left; `why` begins with its name."""

    why: str


# ---- what it knows of a worker ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Desk:
    """One worker, as a service knows it.

    Attributes:
        incarnation: of its present or last life; 0 before the first.
        present: whether it takes part, or is still expected to begin.
        clock: the sequence number of its last push that was taken, over all of its lives.
        pulled: which version of the parameters it has.
        why: why it is not present.
    """

    incarnation: int = 0
    present: bool = True
    clock: int = 0
    pulled: int = 0
    why: str = ""

    def check(self, sender: Sender, message: Message) -> None:
        """Refuse a push of another life, or out of its turn.

        Raises:
            ServerLost: the sender is not, or no longer, the worker that is at work.
            PayloadError: it is not the next one.
        """
        if not self.present or sender.incarnation != self.incarnation:
            why = f" ({self.why})" if self.why else ""
            raise ServerLost(
                f"the server goes on without this process, which was worker {sender.worker} for the "
                f"{sender.incarnation}. time{why}: attach again to come back, with fresh parameters"
            )
        if message.sequence != self.clock + 1:
            raise PayloadError(
                f"worker {sender.worker} has pushed step {message.sequence}, and its next is step "
                f"{self.clock + 1}: each is taken once, and in order"
            )


Desks = tuple[Desk, ...]


def changed(desks: Desks, worker: int, desk: Desk) -> Desks:
    """The desks, with this one in place of the worker's."""
    return (*desks[:worker], desk, *desks[worker + 1 :])


def leaves(desks: Desks, sender: Sender, why: str) -> Desks | None:
    """The desks without this life of a worker; None where it was not at work."""
    desk = desks[sender.worker]
    if not desk.present or desk.incarnation != sender.incarnation:
        return None
    return changed(desks, sender.worker, replace(desk, present=False, why=why))


# ---- payloads -----------------------------------------------------------------------------------------


class Work:
    """A workspace that allocates what is asked for once."""

    def __init__(self) -> None:
        self._scratch: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        """See `contracts.Workspace`."""
        return self.scratch(f"spare {field}", like, like.shape, like.dtype)

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `contracts.Workspace`."""
        kept = self._scratch.get(key)
        if kept is None or kept.shape != torch.Size(shape) or kept.dtype != dtype:
            kept = self._scratch[key] = torch.empty(tuple(shape), dtype=dtype, device=like.device)
        return kept

    def context(self, out: Tensor, name: str, round: int) -> Context:
        """Of an encoding of the server's; what is drawn at random is another draw than any worker's."""
        return Context(out=out, work=self, peers=1, round=round, name=f"server/{name}")


def check(push: Push, work: Work) -> None:
    """Refuse payloads of another size or type than their pieces say.

    Raises:
        PayloadError: says what is there, and what was expected.
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


def check_places(push: Push, numel: int) -> None:
    """Refuse a push about entries that a lot of `numel` has not.

    Raises:
        PayloadError: says which.
    """
    for piece in push.pieces:
        fits = piece.numel == numel if piece.spans is None else all(b <= numel for _, b in piece.spans)
        if not fits:
            raise PayloadError(f"a push is about {piece.numel} entries, and the bucket has {numel}")


def add_(push: Push, out: Tensor, weight: float) -> None:
    """Add `weight` times what a push says to the bucket `out`; nothing, if a part of it cannot be read.

    Raises:
        PayloadError: says what cannot.
    """
    beside = [
        (payload, piece) for payload, piece in zip(push.payloads, push.pieces, strict=True) if piece.spans
    ]
    parts = [_alone(payload, piece, weight) for payload, piece in beside]
    kept = [[out[a:b].clone() for a, b in piece.spans or ()] for _, piece in beside]
    for payload, piece in zip(push.payloads, push.pieces, strict=True):
        if piece.spans is None:
            _add_piece_(payload, piece, out, weight)
    for (_, piece), part, before in zip(beside, parts, kept, strict=True):
        more = torch.split(part, [b - a for a, b in piece.spans or ()])
        for (a, b), old, new in zip(piece.spans or (), before, more, strict=True):
            torch.add(old, new, out=out[a:b])  # in place of what the main one said: one bit cannot say zero


def _alone(payload: Payload, piece: PayloadSpec, weight: float) -> Tensor:
    part = torch.zeros(piece.numel, dtype=piece.dtype)
    _add_piece_(payload, piece, part, weight)
    return part


def _add_piece_(payload: Payload, piece: PayloadSpec, out: Tensor, weight: float) -> None:
    if piece.codec is None:
        out.add_(payload[0].view_as(out), alpha=weight)
    else:
        piece.codec.decode_add_(payload, out, weight)


Saved = Mapping[str, object]
"""A service's state for a checkpoint: tensors, numbers and lists of them."""
