"""Tensors in fewer bytes, whatever they hold: the bytes of each place are coded by their frequencies.

The highest bytes of all words are one plane, the next ones another. A floating-point number's sign is moved
to its lowest bit, so that its exponent, which hardly varies, is a plane (bf16), or is in the highest one. A
plane is coded by the streams of `kernels.entropy`, in pieces as there, or left as it is where that is no
longer:

    kind: a byte       0: the bytes follow; 1: what stands below; 2: the one byte follows that all are
    which              32 bytes: a bit for each value, 1 where it occurs
    shares             uint16 for each of these, in 32768ths
    counts             uint16 for each piece of 16384 bytes: its words
    states             8 of uint32 for each piece
    words              uint16, as the streams take them, piece by piece
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels import dispatch, entropy
from tacit.kernels.reference import byte_planes as reference
from tacit.kernels.reference.entropy import COLUMNS, SLOTS, STREAMS

Plane = NDArray[np.uint8]
RAW, CODED, SAME = 0, 1, 2
VALUES = 256
FEW = 128
"""The bytes of a plane up to which its table would be longer than what it saves."""
SEEN, ALIKE = 1 << 14, 239
"""The bytes of a plane that are looked at first. If of so many pairs of them less than one is alike, which
means more than 7.9 bits a byte, it is left as it is. (Integers, so that a GPU decides as the host does.)"""
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def most_bytes(payload: Sequence[Tensor]) -> int:
    """The most bytes of a message: all planes as they are."""
    return sum(each.nbytes + each.itemsize for each in payload)


def encode_planes(payload: Sequence[Tensor]) -> Tensor:
    """The message (uint8) of tensors on the host."""
    parts = [part for each in payload for plane in _planes(each) for part in _coded(plane)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.uint8), *parts]))


def decode_planes(message: Tensor, payload: Sequence[Tensor]) -> None:
    """Overwrite the tensors with what the message holds.

    Raises:
        PayloadError: it is damaged, cut short, or of other tensors.
    """
    reader = _Reader(message.numpy(), 0)
    for each in payload:
        if each.itemsize == 1:
            reader.plane(each.view(-1).view(torch.uint8).numpy())
            continue
        planes = np.empty((each.itemsize, each.numel()), np.uint8)
        for plane in planes:
            reader.plane(plane)
        _kernels("byte_planes", reference).join(planes, int(each.is_floating_point()), _words(each))
    if reader.at != message.numel():
        raise PayloadError(
            f"a message of {message.numel()} bytes, of which {reader.at} belong to its payload: it is damaged"
        )


def encode_on_device(x: Tensor, message: Tensor, at: Tensor) -> Tensor:
    """Write the planes of `x` into `message` from byte `at` (int32) on, without waiting.

    Returns:
        Where they end, a number there as `at` is.
    """
    planes = _places(x).t().flip(0)
    if _turns(x):
        planes = (planes << 1) | (planes.roll(-1, 0) >> 7)
    return dispatch.run_opaque("byte_planes.encode", _encode_by_host, planes.contiguous(), message, at)


def decode_on_device(messages: Tensor, lengths: Tensor, at: Tensor, x: Tensor) -> Tensor:
    """Overwrite each row of `x` with its planes, from byte `at` of its message on, without waiting.

    Args:
        messages: a row for each; `lengths` (int32) are on the device, as `at`.

    Returns:
        Where they end; -1 where a message is damaged, or its `at` is -1. The row is anything then.
    """
    planes = torch.empty((len(x), x.itemsize, x[0].numel()), dtype=torch.uint8, device=x.device)
    end = dispatch.run_opaque("byte_planes.decode", _decode_by_host, messages, lengths, at, planes)
    if _turns(x):
        planes = (planes >> 1) | (planes.roll(1, 1) << 7)
    _places(x).view(len(x), x[0].numel(), x.itemsize).copy_(planes.flip(1).transpose(1, 2))
    return end


def _places(x: Tensor) -> Tensor:
    """The bytes of each word of `x`, a row for each word, the lowest first."""
    return x.view(-1).view(torch.uint8).view(x.numel(), x.itemsize)


def _turns(x: Tensor) -> bool:
    return x.itemsize > 1 and x.is_floating_point()


def _encode_by_host(planes: Tensor, message: Tensor, at: Tensor) -> Tensor:
    """Without Triton: the host waits for the planes, and codes them."""
    parts = [part for plane in planes.cpu().numpy() for part in _coded(plane)]
    found, begin = torch.from_numpy(np.concatenate(parts)), int(at)
    message[begin : begin + len(found)].copy_(found)
    return at + len(found)


def _decode_by_host(messages: Tensor, lengths: Tensor, at: Tensor, planes: Tensor) -> Tensor:
    end = torch.full_like(at, -1)
    for i, (message, length, begin) in enumerate(
        zip(messages.cpu(), lengths.tolist(), at.tolist(), strict=True)
    ):
        found, reader = np.empty(planes.shape[1:], np.uint8), _Reader(message[:length].numpy(), begin)
        with suppress(PayloadError):
            for plane in found:
                reader.plane(plane)
            planes[i].copy_(torch.from_numpy(found))
            end[i] = reader.at
    return end


def piece_count(size: int) -> int:
    """How many pieces a plane of so many bytes is coded in; one at least."""
    return max(1, -(-size // entropy.PIECE))


def _kernels(name: str, plain: Any) -> Any:
    return dispatch.numba_kernels(name) if dispatch.active_backend() == "numba" else plain


def _streams() -> Any:
    from tacit.kernels.reference import entropy as plain

    return _kernels("entropy", plain)


def _words(x: Tensor) -> NDArray[Any]:
    return x.view(-1).view(torch.uint8).numpy().view(_UNSIGNED[x.itemsize])


def _planes(x: Tensor) -> Plane:
    """The bytes of a tensor, a row for each place in its words."""
    if x.itemsize == 1:
        return x.contiguous().view(-1).view(torch.uint8).numpy()[None]
    planes = np.empty((x.itemsize, x.numel()), np.uint8)
    _kernels("byte_planes", reference).part(_words(x.contiguous()), int(x.is_floating_point()), planes)
    return planes


def _coded(plane: Plane) -> Iterator[Plane]:
    """The parts of a plane's message."""
    raw = np.array([RAW], np.uint8), plane
    size = len(plane)
    seen = plane[:: max(1, size // SEEN)]
    if size and seen.min() == seen.max() and plane.min() == plane.max():
        yield np.array([SAME, plane[0]], np.uint8)
        return
    if size <= FEW or _is_dense(np.bincount(seen, minlength=VALUES)):
        yield from raw
        return
    columns = np.zeros((COLUMNS, VALUES), np.int64)
    _streams().count(plane, columns)
    counts = columns.sum(0)
    shares = np.maximum(counts * SLOTS // size, counts > 0)
    shares[int(shares.argmax())] += SLOTS - int(shares.sum())
    pieces = piece_count(size)
    states, words = np.empty((pieces, STREAMS), np.uint32), np.empty(size + 1, np.uint16)
    taken = np.empty(pieces, np.int64)
    _streams().encode(plane, entropy.PIECE, shares.astype(np.uint32), states, words, taken)
    table, used = shares[shares > 0].astype(np.uint16), int(taken.sum())
    head = np.packbits(shares > 0), table, taken.astype(np.uint16), states.reshape(-1)
    parts = np.array([CODED], np.uint8), *head, words[len(words) - used :]
    yield from [each.view(np.uint8) for each in parts] if sum(each.nbytes for each in parts) <= size else raw


def _is_dense(counts: NDArray[np.int64]) -> bool:
    seen = int(counts.sum())
    return ALIKE * int((counts * (counts - 1)).sum()) < seen * (seen - 1)


class _Reader:
    """A message that is read plane by plane.

    Attributes:
        at: the byte that is read next.
    """

    def __init__(self, message: Plane, at: int) -> None:
        self._message, self.at = message, at

    def _take(self, size: int) -> Plane:
        found = self._message[self.at : self.at + size]
        if len(found) < size or self.at < 0:
            raise PayloadError(
                f"a message of {len(self._message)} bytes is cut short: {size} were expected from byte "
                f"{self.at} on"
            )
        self.at += size
        return found

    def plane(self, out: Plane) -> None:
        """Write the next plane, of as many bytes as `out` has."""
        kind = int(self._take(1)[0])
        if kind == RAW:
            out[:] = self._take(len(out))
            return
        if kind == SAME:
            out[:] = self._take(1)
            return
        if kind != CODED:
            raise PayloadError(f"a plane of {len(out)} bytes is of kind {kind}: the message is damaged")
        which = np.unpackbits(self._take(VALUES // 8)).astype(bool)
        shares = np.zeros(VALUES, np.uint32)
        shares[which] = self._take(2 * int(which.sum())).copy().view(np.uint16)
        if int(shares.sum()) != SLOTS:
            raise PayloadError(
                f"the shares of bytes add up to {int(shares.sum())}, where {SLOTS} are expected: the message "
                "is damaged"
            )
        pieces = piece_count(len(out))
        counts = self._take(2 * pieces).copy().view(np.uint16).astype(np.int64)
        states = self._take(4 * STREAMS * pieces).copy().view(np.uint32).reshape(pieces, STREAMS)
        words = self._take(2 * int(counts.sum())).copy().view(np.uint16)
        if not _streams().decode(shares, entropy.PIECE, states, counts, words, out):
            raise PayloadError(f"a plane of {len(out)} bytes does not end as it began: it is damaged")
