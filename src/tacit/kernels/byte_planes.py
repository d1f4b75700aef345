"""Tensors in fewer bytes, whatever they hold: the bytes of each place are coded by their frequencies.

The highest bytes of all words are one plane, the next ones another. A floating-point number's sign is moved
to its lowest bit, so that its exponent, which hardly varies, is a plane (bf16), or is in the highest one. A
plane is coded by the streams of `kernels.entropy`, or left as it is where that is no longer:

    kind: a byte       0: the bytes follow; 1: what stands below; 2: the one byte follows that all are
    used               uint32: how many words there are
    which              32 bytes: a bit for each value, 1 where it occurs
    shares             uint16 for each of these, in 32768ths
    states             8 of uint32
    words              uint16, as the streams take them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tacit.errors import PayloadError
from tacit.kernels import dispatch
from tacit.kernels.reference import byte_planes as reference
from tacit.kernels.reference.entropy import COLUMNS, SLOTS, STREAMS

Plane = NDArray[np.uint8]
RAW, CODED, SAME = 0, 1, 2
_VALUES = 256
_FEW = 128
"""The bytes of a plane up to which its table would be longer than what it saves."""
_SEEN, _DENSE = 1 << 14, 7.9
"""The bytes of a plane that are looked at first, and the bits of a byte from which on it is left as it is."""
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
    reader = _Reader(message.numpy())
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


def _kernels(name: str, plain: Any) -> Any:
    return dispatch.numba_kernels(name) if dispatch.active_backend() == "numba" else plain


def _streams() -> Any:
    from tacit.kernels.reference import entropy

    return _kernels("entropy", entropy)


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
    seen = plane[:: max(1, size // _SEEN)]
    if size and seen.min() == seen.max() and plane.min() == plane.max():
        yield np.array([SAME, plane[0]], np.uint8)
        return
    if size <= _FEW or _bits(np.bincount(seen, minlength=_VALUES)) > _DENSE:
        yield from raw
        return
    columns = np.zeros((COLUMNS, _VALUES), np.int64)
    _streams().count(plane, columns)
    counts = columns.sum(0)
    shares = np.maximum(counts * SLOTS // size, counts > 0)
    shares[int(shares.argmax())] += SLOTS - int(shares.sum())
    states, words, count = (
        np.empty((1, STREAMS), np.uint32),
        np.empty(size + 1, np.uint16),
        np.zeros(1, np.int64),
    )
    _streams().encode(plane, size, shares.astype(np.uint32), states, words, count)
    used = int(count[0])
    table = shares[shares > 0].astype(np.uint16)
    head = np.array([used], np.uint32), np.packbits(shares > 0), table, states[0], words[len(words) - used :]
    parts = [np.array([CODED], np.uint8), *(each.view(np.uint8) for each in head)]
    yield from parts if sum(map(len, parts)) <= size else raw


def _bits(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


class _Reader:
    """A message that is read plane by plane.

    Attributes:
        at: the byte that is read next.
    """

    def __init__(self, message: Plane) -> None:
        self._message, self.at = message, 0

    def _take(self, size: int) -> Plane:
        found = self._message[self.at : self.at + size]
        if len(found) < size:
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
        used = int(self._take(4).copy().view(np.uint32)[0])
        which = np.unpackbits(self._take(_VALUES // 8)).astype(bool)
        shares = np.zeros(_VALUES, np.uint32)
        shares[which] = self._take(2 * int(which.sum())).copy().view(np.uint16)
        if int(shares.sum()) != SLOTS:
            raise PayloadError(
                f"the shares of bytes add up to {int(shares.sum())}, where {SLOTS} are expected: the message "
                "is damaged"
            )
        states = self._take(4 * STREAMS).copy().view(np.uint32)[None]
        words, count = self._take(2 * used).copy().view(np.uint16), np.array([used])
        if not _streams().decode(shares, len(out), states, count, words, out):
            raise PayloadError(f"a plane of {len(out)} bytes does not end as it began: it is damaged")
