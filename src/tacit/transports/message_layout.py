"""The layout of a payload in one message: its tensors as bytes, wide types first, without padding."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

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
    Read,
    ReduceScatter,
    Request,
)
from tacit.torch_compat import copy_each_

T = TypeVar("T")

AT_ONCE = 1 << 16
"""The bytes up to which Gloo gathers by an all-to-all of copies: in its ring a rank takes one turn for each
peer, and waits for a core in each if ranks share cores. Beyond about 200 kB the link takes longer. It is not
used if nodes have several ranks, as all copies for one node would cross its link.
"""

WAYS = 2
"""How often a message of Gloo takes the way: a receiver says first that it is ready, and then is sent to."""

IN_ROUNDS = 1 << 15
"""The bytes a rank beyond which rounds of pairs are faster than Gloo's all-to-all; see `pairwise`."""


def nbytes(payload: Payload) -> int:
    """The number of bytes of a payload."""
    return sum(map(_BYTES, payload))


_BYTES = attrgetter("nbytes")
_DTYPE, _ELEMENT = attrgetter("dtype"), attrgetter("itemsize")


def order(payload: Payload) -> Sequence[int]:
    """The tensors' order in the message: by falling element size, so that each one is aligned."""
    sizes = [*map(_ELEMENT, payload)]
    return sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)  # a stable sort


def pack_(payload: Payload, message: Tensor) -> None:
    """Write the payload to `message`, a uint8 tensor of `nbytes(payload)`; on a GPU in one launch."""
    parts = [payload[i].reshape(-1).view(torch.uint8) for i in order(payload)]
    copy_each_(_bytes_of(message, payload), parts)


def _bytes_of(message: Tensor, like: Payload) -> list[Tensor]:
    """Where each tensor of a payload lies in a message, in their order there."""
    places, start = [], 0
    for i in order(like):
        stop = start + like[i].nbytes
        places.append(message[start:stop])
        start = stop
    return places


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


class Slots:
    """Memory for payloads, one after the other, and the tensors of each in it.

    Attributes:
        message: all of it, flat (uint8).
        sizes: bytes from each payload to the next: up to seven more than it has, so that all lie aligned.
    """

    def __init__(self, likes: Sequence[Payload]) -> None:
        forms = {id(like): [(each.shape, each.dtype) for each in like] for like in likes}
        self._forms = [forms[id(like)] for like in likes]
        self.sizes = [-(-nbytes(like) // _ALIGNED) * _ALIGNED for like in likes]
        device = next(each.device for like in likes for each in like)
        self.message = torch.zeros(sum(self.sizes), dtype=torch.uint8, device=device)
        self.slots = torch.split(self.message, self.sizes)
        self._payloads = [unpack(slot, like) for slot, like in zip(self.slots, likes, strict=True)]
        self._orders = [order(like) for like in likes]
        self._places = dict[int, list[Tensor]]()

    def fit(self, likes: Sequence[Payload]) -> bool:
        """Whether they are for payloads of these forms."""
        if len(likes) != len(self._forms):
            return False
        before: tuple[object, object] = None, None
        for like, form in zip(likes, self._forms, strict=True):
            if like is before[0] and form is before[1]:  # as in a gather, whose payloads are all alike
                continue
            before = like, form
            if len(like) != len(form):
                return False
            for each, (shape, dtype) in zip(like, form, strict=True):
                if each.dtype != dtype or each.shape != shape:
                    return False
        return True

    def pack(self, payloads: Sequence[Payload], first: int = 0) -> None:
        """Write these payloads to the slots from the first on; on a GPU in one launch."""
        places: list[Tensor] = []
        parts: list[Tensor] = []
        for at, payload in enumerate(payloads, first):
            if at not in self._places:
                self._places[at] = _bytes_of(self.slots[at], payload)
            places += self._places[at]
            for i in self._orders[at]:
                each = payload[i]
                parts.append((each if each.dim() == 1 else each.reshape(-1)).view(torch.uint8))
        copy_each_(places, parts)

    def payloads(self, first: int = 0) -> list[Payload]:
        """Those of all slots from the first on; overwritten when the memory is used again."""
        return self._payloads[first:]


_ALIGNED = 8
"""The bytes of the widest number of a payload."""


def ring_bytes(request: Collective, place: AxisRank) -> int:
    """Bytes that this rank sends, by the formulas of ring collectives, rounded up.

    With P peers and a payload of n bytes: all-reduce 2 (P - 1) / P x n, all-gather (P - 1) x n. In a
    reduce-scatter a rank sends all spans but its own; in an all-gather its span to all others; in an
    all-to-all each peer's payload. A `Permute` costs a sender n, a `PushPull` what it pushes.
    """
    peers = place.peers
    match request:
        case AllReduce(payload):
            types = {*map(_DTYPE, payload)}
            assert len(types) < 2, f"an AllReduce of {types}: write one AllReduce for each type, in a Grouped"
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


def counted(
    exchange: Generator[Request, Any, T], place: Callable[[str], AxisRank]
) -> Generator[Request, Any, tuple[T, int]]:
    """Run `exchange`. Returns its result, and the bytes that this rank has sent in it, by formulas."""
    sent, answer = 0, None
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            return end.value, sent
        assert isinstance(request, Collective | Read), f"a {type(request).__name__} reached the meter"
        if not isinstance(request, Read):
            sent += ring_bytes(request, place(request.axis))
        answer = yield request


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
