"""How a payload lies in one message: tensors one after the other as bytes, wide types first, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from tacit.contracts import (
    AllGather,
    AllGatherInto,
    AllReduce,
    AllToAll,
    AxisRank,
    Collective,
    Payload,
    Permute,
    PushPull,
    ReduceScatter,
)

AT_ONCE = 1 << 16
"""Bytes up to which Gloo gathers by an all-to-all of copies: in its ring a rank takes as many turns as it has
peers, and waits for a core in each where ranks share them. Beyond about 200 kB the link takes longer. Not
where nodes have several ranks, as the copies for one node would all cross its link."""

IN_ROUNDS = 1 << 15
"""Bytes for each rank beyond which rounds of pairs are faster than Gloo's all-to-all; see `pairwise`."""


def nbytes(payload: Payload) -> int:
    """The bytes of a payload."""
    return sum(map(_BYTES, payload))


_BYTES = attrgetter("nbytes")
_ELEMENT = attrgetter("itemsize")


def order(payload: Payload) -> Sequence[int]:
    """The tensors' order in the message: by element size, falling, so that each one lies aligned."""
    sizes = [*map(_ELEMENT, payload)]
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # which keeps the order of equals


def pack_(payload: Payload, message: Tensor) -> None:
    """Write the payload to `message`, a uint8 tensor of `nbytes(payload)`."""
    start = 0
    for i in order(payload):
        stop = start + payload[i].nbytes
        message[start:stop].copy_(payload[i].reshape(-1).view(torch.uint8))
        start = stop


def unpack(message: Tensor, like: Payload) -> Payload:
    """The tensors of a message, with the shapes and types of `like`: views where they lie aligned."""
    views = [*like]
    start = 0
    for i in order(like):
        each = like[i]
        stop = start + each.nbytes
        piece = message[start:stop]
        if piece.storage_offset() % each.itemsize:  # a message may begin anywhere in its buffer
            piece = piece.clone()
        views[i] = piece.view(each.dtype).view(each.shape)
        start = stop
    return tuple(views)


def ring_bytes(request: Collective, place: AxisRank) -> int:
    """Bytes that this rank sends, by the formulas of ring collectives, rounded up.

    With P peers and a payload of n bytes: all-reduce 2 (P - 1) / P x n, all-gather (P - 1) x n. In a
    reduce-scatter a rank sends all stretches but its own, in its collect its own to all others; in an
    all-to-all each peer its payload. A `Permute` costs those who send n, an `PushPull` what it pushes.
    """
    peers = place.peers
    match request:
        case AllReduce(payload):
            return -(-2 * (peers - 1) * nbytes(payload) // peers)
        case AllGather(payload):
            return (peers - 1) * nbytes(payload)
        case ReduceScatter(x, spans) | AllGatherInto(x, spans):
            start, stop = spans[place.rank]
            mine = stop - start
            count = x.numel() - mine if isinstance(request, ReduceScatter) else (peers - 1) * mine
            return count * x.element_size()
        case AllToAll(payloads):
            return sum(nbytes(payload) for i, payload in enumerate(payloads) if i != place.rank)
        case PushPull(payloads):
            return sum(nbytes(payload) for payload in payloads)
        case Permute(payload, to):
            return 0 if to[place.rank] is None else nbytes(payload)


def given_bytes(request: Collective) -> int:
    """Bytes of what this rank gives to a collective; of a `Permute`, also where it only receives."""
    match request:
        case AllToAll(payloads) | PushPull(payloads):
            return sum(map(nbytes, payloads))
        case ReduceScatter(x) | AllGatherInto(x):
            return nbytes((x,))
        case Permute(payload, into=into):
            return max(nbytes(payload), nbytes(into))
        case AllReduce(payload) | AllGather(payload):
            return nbytes(payload)


def empty_message(like: Payload, copies: int = 1) -> Tensor:
    """An uninitialised message for `copies` payloads."""
    return torch.empty(copies * nbytes(like), dtype=torch.uint8, device=like[0].device)
