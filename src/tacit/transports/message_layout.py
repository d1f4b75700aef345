"""The layout of a payload in one message: its tensors as bytes, wide types first, without padding."""

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
"""The bytes up to which Gloo gathers by an all-to-all of copies: in its ring a rank takes one turn for each
peer, and waits for a core in each if ranks share cores. Beyond about 200 kB the link takes longer. It is not
used if nodes have several ranks, as all copies for one node would cross its link.
"""

IN_ROUNDS = 1 << 15
"""The bytes a rank beyond which rounds of pairs are faster than Gloo's all-to-all; see `pairwise`."""


def nbytes(payload: Payload) -> int:
    """The number of bytes of a payload."""
    return sum(map(_BYTES, payload))


_BYTES = attrgetter("nbytes")
_ELEMENT = attrgetter("itemsize")


def order(payload: Payload) -> Sequence[int]:
    """The tensors' order in the message: by falling element size, so that each one is aligned."""
    sizes = [*map(_ELEMENT, payload)]
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # a stable sort


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
    reduce-scatter a rank sends all spans but its own; in an all-gather its span to all others; in an
    all-to-all each peer's payload. A `Permute` costs a sender n, a `PushPull` what it pushes.
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
    """The bytes of this rank's input to a collective; of a `Permute`, also if it only receives."""
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
