"""Select the k entries of largest magnitude: exactly k of them, at little more than one pass over memory.

A threshold from a sample lets through a little more than k candidates; the exact choice is made among them,
and the others are given back. What is chosen does not depend on the threshold, nor on which version of the
kernels runs: the k largest magnitudes; of equal ones those at the lowest positions; a NaN is smaller than
everything. They come in the order of their positions.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.kernels.jit import address, half
from tacit.kernels.largest import in_chunks_torch, largest_torch
from tacit.kernels.pick import by_triton, fits, fits32, fits_triton, fits_triton32, on_host, path, warming

BLOCK = 1 << 18
"""Elements that the plain torch version works on at a time: 1 MiB of fp32, within a second-level cache."""
RUN = 16
"""Neighbours that a sample takes together, as they come from memory together."""
CHUNK = 1 << 14
"""The largest chunk that one program on a GPU holds."""
SPARE = 1024
"""Places beyond those that are filled, so that the compiled pass need not look at every entry."""


class Room(NamedTuple):
    """Where candidates are collected: positions (int32) and entries, both of `room_for` places."""

    at: Tensor
    values: Tensor


class Chosen(NamedTuple):
    """Positions (int32), rising, and the entries there: the first places of a `Room`."""

    at: Tensor
    values: Tensor


def warm_up(device: str = "cpu") -> None:
    """Compile now what is compiled for this type of device beforehand, so that the first round does not."""
    if path(device) == "numba":
        import tacit.kernels.scan  # noqa: F401


@cache
def room_for(numel: int, k: int) -> int:
    """How many places a `Room` needs to choose k of `numel` entries."""
    sample = _sampled(numel, 1)
    wanted = _wanted(numel, k, sample)
    # As likely as not there are as many as wanted; 4 sigma more are so rare that the slow way will do.
    most = math.ceil((wanted + 4 * math.sqrt(wanted)) * numel / max(sample, 1))
    return min(numel, max(k, most)) + SPARE


def new_room(x: Tensor, k: int) -> Room:
    """A `Room` to choose k entries of `x`."""
    places = room_for(x.numel(), k)
    return Room(x.new_empty(places, dtype=torch.int32), x.new_empty(places))


def select_largest(
    x: Tensor,
    k: int,
    room: Room | None = None,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Chosen:
    """The `k` entries of largest magnitude of the flat tensor a = x + residual; of `x`, without `residual`.

    Args:
        room: is overwritten.
        residual: with `owed`, or both are None.
        owed: becomes a, with zeros where entries were chosen.
    """
    room = room or new_room(x, k)
    if x.is_meta:
        warm_up(warming())
    if x.is_meta or k == 0:
        return Chosen(room.at[:k], room.values[:k])
    if not fits32(x) and _by_triton("select.largest", x, k, *room, residual, new_residual):
        return Chosen(room.at[:k], room.values[:k])
    if not on_host(x):
        largest_torch(x, k, *room, residual, new_residual)
        return Chosen(room.at[:k], room.values[:k])
    for effort in (1, 16):
        found, least = _attempt(x, k, effort, room, residual, new_residual)
        if found is not None and found.at.numel() == k:
            return found
        if found is not None and least:
            filled = _with_zeros(found, k, x, residual, new_residual)
            if filled is not None:
                return filled
        if _sampled(x.numel(), effort) == x.numel():
            break
    return _exact(x, k, room, residual, new_residual)


def _attempt(
    x: Tensor, k: int, effort: int, room: Room, residual: Tensor | None, new_residual: Tensor | None
) -> tuple[Chosen | None, bool]:
    """The k largest, or all that reach a threshold if fewer do; None where there is no room.

    And whether only zeros do not reach it.
    """
    if fits32(x):
        numel, step, sample = x.numel(), _step(x.numel(), effort), _sampled(x.numel(), effort)
        wanted = _wanted(numel, k, sample)
        wanted = 0 if wanted == sample < numel else wanted  # all of the sample: then all but zeros
        given = _given(x, residual, new_residual)
        count, least = half("scan").choose(*given, numel, k, step, wanted, *_collected(room))
        return None if count < 0 else Chosen(room.at[:count], room.values[:count]), least
    threshold, least = _guess(x, residual, k, effort)
    found = sift(x, threshold, room, residual, new_residual)
    return _settle(found, k, new_residual) if found is not None and found.at.numel() > k else found, least


def select_above(
    x: Tensor,
    threshold: float,
    most: int,
    room: Room | None = None,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Chosen:
    """The entries of a = x + residual whose magnitude is at least `threshold` (positive), `most` at the most.

    Where there are more, the largest of them. The arguments are those of `select_largest`.
    """
    room = room or new_room(x, most)
    if x.is_meta:
        warm_up(warming())
        return Chosen(room.at[:most], room.values[:most])
    found = sift(x, threshold, room, residual, new_residual)
    if found is None:
        return select_largest(x, most, room, residual, new_residual)
    return _settle(found, most, new_residual) if found.at.numel() > most else found


def select_in_chunks(
    x: Tensor,
    per_chunk: int,
    chunk: int,
    room: Room,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Chosen:
    """The `per_chunk` largest of each `chunk` entries of x + residual; of fewer at the end, as many or all.

    Args:
        room: is overwritten; has a place for each that is chosen.
        residual: as in `select_largest`, and so `owed`.
    """
    whole, rest = divmod(x.numel(), chunk)
    k = whole * per_chunk + min(per_chunk, rest)
    if x.is_meta:
        warm_up(warming())
    elif k and fits32(x):
        given = _given(x, residual, new_residual)
        half("scan").in_chunks(*given, x.numel(), per_chunk, chunk, *_collected(room))
    elif k and not (
        chunk <= CHUNK and _by_triton("select.in_chunks", x, per_chunk, chunk, *room, residual, new_residual)
    ):
        in_chunks_torch(x, per_chunk, chunk, *room, residual, new_residual)
    return Chosen(room.at[:k], room.values[:k])


def _by_triton(name: str, x: Tensor, *arguments: Any) -> bool:
    given = (each for each in arguments if isinstance(each, Tensor) and each.dtype != torch.int32)
    return fits_triton(x, *given) and by_triton(name, x, *arguments)


# ---- the pass over memory -----------------------------------------------------------------------------


def sift(
    x: Tensor,
    threshold: float,
    room: Room,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Chosen | None:
    """All entries of a = x + residual with |a| >= threshold; None where there is no room for them.

    `owed` becomes a, with zeros in their places; it is unfinished where None is returned.
    """
    if fits_triton32(x, room.values, *(each for each in (residual, new_residual) if each is not None)):
        from tacit.kernels.cuda import entries

        count = entries.sift(x, threshold, *room, residual, new_residual)
        return None if count < 0 else Chosen(room.at[:count], room.values[:count])
    if not fits(x):
        return sift_torch(x, threshold, room, residual, new_residual)
    scan = half("scan")
    if x.dtype == torch.float32:
        given, numel = _given(x, residual, new_residual), x.numel()
        count = scan.sift(*given, numel, threshold, *_collected(room))
    else:
        before, after = (
            (x[:0], x[:0]) if residual is None or new_residual is None else (residual, new_residual)
        )
        array, before_, after_, index, values = _arrays(x, before, after, *room)
        count = scan.sift_one_by_one(array, before_, after_, threshold, index, values)
    return None if count < 0 else Chosen(room.at[:count], room.values[:count])


def _given(x: Tensor, residual: Tensor | None, new_residual: Tensor | None) -> tuple[int, int, int]:

    if residual is None or new_residual is None:
        return address(x), 0, 0
    return address(x), address(residual), address(new_residual)


def _collected(room: Room) -> tuple[int, int, int]:

    return address(room.at), address(room.values), room.at.numel()


def sift_torch(
    x: Tensor,
    threshold: float,
    room: Room,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Chosen | None:
    """The reference: `sift` in plain torch, in blocks that stay in the cache; equal to the last bit."""
    count = 0
    for start in range(0, x.numel(), BLOCK):
        piece = x[start : start + BLOCK]
        if residual is not None and new_residual is not None:
            piece = torch.add(piece, residual[start : start + BLOCK], out=new_residual[start : start + BLOCK])
        index = piece.abs().ge(threshold).nonzero().view(-1)
        after = count + index.numel()
        if after + SPARE > room.at.numel():
            return None
        room.at[count:after] = index + start
        torch.index_select(piece, 0, index, out=room.values[count:after])
        if new_residual is not None:
            piece[index] = 0
        count = after
    return Chosen(room.at[:count], room.values[:count])


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


# ---- the threshold ------------------------------------------------------------------------------------


def _step(numel: int, effort: int) -> int:
    """From one run of the sample to the next: of a small tensor 4096 entries are looked at, else 65536."""
    sample = effort << (12 if numel < 1 << 20 else 16)
    return (numel * RUN // sample) | 1  # odd, so that it does not march in step with the rows of a matrix


@cache
def _sampled(numel: int, effort: int) -> int:
    """How many entries are looked at."""
    step = _step(numel, effort)
    return numel if step <= RUN else ((numel - RUN) // step + 1) * RUN


def _sample(x: Tensor, effort: int) -> Tensor:
    step = _step(x.numel(), effort)
    return (
        x
        if step <= RUN
        else x.as_strided(((x.numel() - RUN) // step + 1, RUN), (step, 1), x.storage_offset())
    )


@cache
def _wanted(numel: int, k: int, sample: int) -> int:
    """How many of the sample shall reach the threshold, so that in all likelihood k of all do."""
    if sample == numel:
        return k
    expected = k * sample / numel
    return min(sample, math.ceil(1.05 * expected + 4 * math.sqrt(expected)))


def _guess(x: Tensor, residual: Tensor | None, k: int, effort: int) -> tuple[float, bool]:
    """A threshold above 0 that k entries or a few more reach; and whether all but zeros reach it."""
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    sample = _sample(x, effort)
    if residual is not None:
        sample = sample + _sample(residual, effort)
    wanted = _wanted(x.numel(), k, sample.numel())
    if wanted == sample.numel() < x.numel():
        return least, True
    threshold, _ = _nth_largest(sample.reshape(-1), wanted)
    return (threshold, False) if not threshold < least else (least, True)


def _nth_largest(x: Tensor, n: int) -> tuple[float, int]:
    """The n-th largest magnitude, and how many are larger. NaN counts as the largest."""
    place = x.numel() - n
    if fits(x):
        import numpy as np

        array = np.abs(x.detach().numpy())
        array.partition(place)
        return float(array[place]), int(np.count_nonzero(array[place:] > array[place]))
    magnitudes = x.abs()
    nth = torch.kthvalue(magnitudes, place + 1).values
    return float(nth), int((magnitudes > nth).sum())


# ---- the exact choice ---------------------------------------------------------------------------------


def _settle(found: Chosen, k: int, new_residual: Tensor | None) -> Chosen:
    """The k largest of what was found."""
    if found.at.numel() > k:
        least, larger = _nth_largest(found.values, k)
        if fits(found.values):
            index, values, back = _arrays(*found, found.values[:0] if new_residual is None else new_residual)
            half("scan").settle(index, values, values.dtype.type(least), k - larger, back)
        else:
            settle_torch(found, least, k - larger, new_residual)
    return Chosen(found.at[:k], found.values[:k])


def settle_torch(found: Chosen, least: float, equal: int, new_residual: Tensor | None) -> None:
    """The reference: keep what is above `least`, and the first `equal` that are not; the others are owed."""
    ties = found.values.abs() == least
    keep = (found.values.abs() > least) | (ties & (ties.cumsum(0) <= equal))
    if new_residual is not None:
        new_residual[found.at[~keep].long()] = found.values[~keep]
    kept = int(keep.sum())
    found.at[:kept] = found.at[keep]
    found.values[:kept] = found.values[keep]


def _with_zeros(
    found: Chosen, k: int, x: Tensor, residual: Tensor | None, new_residual: Tensor | None
) -> Chosen | None:
    """All that is not zero is found, and not enough: the first zeros make it up, where none is a NaN."""
    free = torch.ones(k, dtype=torch.bool, device=x.device)
    free[found.at[found.at < k].long()] = False
    first = free.nonzero().view(-1)[: k - found.at.numel()]
    zeros = x[first] if residual is None else x[first] + residual[first]
    if bool(zeros.isnan().any()):
        return None
    if new_residual is not None:
        new_residual[first] = 0
    index, order = torch.cat([found.at, first.to(torch.int32)]).sort()
    return Chosen(index, torch.cat([found.values, zeros])[order])


def _exact(x: Tensor, k: int, room: Room, residual: Tensor | None, new_residual: Tensor | None) -> Chosen:
    """The slow way, which needs no luck."""
    a = x if residual is None or new_residual is None else torch.add(x, residual, out=new_residual)
    magnitudes = a.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    least = float(torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values)
    above = (magnitudes > least).nonzero().view(-1)
    equal = (magnitudes == least).nonzero().view(-1)[: k - above.numel()]
    index = torch.cat([above, equal]).sort().values
    room.at[:k] = index
    torch.index_select(a, 0, index, out=room.values[:k])
    if new_residual is not None:
        new_residual[index] = 0
    return Chosen(room.at[:k], room.values[:k])
