"""Select the k entries of largest magnitude: exactly k of them, at little more than one pass over memory.

A threshold from a sample lets through a little more than k candidates; the exact choice is made among them,
and the others are given back. What is selected does not depend on the threshold, nor on which version of the
kernels runs: the k largest magnitudes; of equal ones those at the lowest positions; a NaN is smaller than
everything. They come in the order of their positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.kernels.dispatch import (
    numba_kernels,
    numba_takes,
    numba_takes_fp32,
    on_host,
    run_triton,
    triton_takes,
    triton_takes_fp32,
    warm_up,
)
from tacit.kernels.reference import select as reference
from tacit.kernels.sparse import EntryBuffer, Selection, new_buffer, sample_rank, sample_size, sample_step
from tacit.kernels.thread_scratch import thread_scratch

LARGEST_CHUNK = 1 << 14
"""The largest chunk that one program on a GPU holds."""


def select_largest(
    x: Tensor, k: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None, look: Callable[[], None] | None = None,
) -> Selection:  # fmt: skip
    """The `k` entries of largest magnitude of the flat tensor a = x + residual; of `x`, without `residual`.

    Args:
        buffer: is overwritten; `new_buffer` says how large.
        residual: with `new_residual`, or both are None.
        new_residual: becomes a, with zeros where entries were selected.
        look: is called, unless all entries of a were seen to be finite.
    """
    found, finite = _largest(x, k, buffer or new_buffer(x, k), residual, new_residual)
    if look is not None and not finite:
        look()
    return found


def _largest(
    x: Tensor, k: int, buffer: EntryBuffer, residual: Tensor | None, new_residual: Tensor | None
) -> tuple[Selection, bool]:
    """`select_largest`, and whether all entries were seen to be finite."""
    if x.is_meta:
        warm_up("select")
    if x.is_meta or k == 0:
        return _first(buffer, k), False
    if not numba_takes_fp32(x) and _run_triton(
        "select.select_largest", x, k, *buffer, residual, new_residual
    ):
        return _first(buffer, k), False
    if not on_host(x):
        reference.select_largest(x, k, *buffer, residual, new_residual)
        return _first(buffer, k), False
    for effort in (1, 16):
        found, all_but_zeros, finite = _attempt(x, k, effort, buffer, residual, new_residual)
        if found is not None and found.positions.numel() == k:
            return found, finite
        if found is not None and all_but_zeros:
            filled = reference.fill_with_zeros(found, k, x, residual, new_residual)
            if filled is not None:
                return filled, finite
        if sample_size(x.numel(), effort) == x.numel():
            break
    reference.select_by_kthvalue(x, k, *buffer, residual, new_residual)
    return _first(buffer, k), False


def _attempt(
    x: Tensor, k: int, effort: int, buffer: EntryBuffer, residual: Tensor | None, new_residual: Tensor | None,
) -> tuple[Selection | None, bool, bool]:  # fmt: skip
    """The k largest, or all that reach a threshold if fewer do; None where the buffer is too small.

    And whether all but zeros reach it; and whether all entries were seen to be finite.
    """
    if numba_takes_fp32(x):
        numel, step, sample = x.numel(), sample_step(x.numel(), effort), sample_size(x.numel(), effort)
        rank = sample_rank(numel, k, sample)
        rank = 0 if rank == sample < numel else rank  # all of the sample: then all but zeros
        room = thread_scratch("sample", sample if rank else 0, x.dtype, x.device)
        kernel = numba_kernels("select").select_largest
        given, at = _addresses(x, residual, new_residual), _buffer_addresses(buffer)
        count, all_but_zeros, finite = kernel(*given, numel, k, step, rank, *at, room.data_ptr())
        return _first(buffer, count) if count >= 0 else None, all_but_zeros, finite
    threshold, all_but_zeros = reference.guess_threshold(x, residual, k, effort, _nth_largest)
    found = select_reaching(x, threshold, buffer, residual, new_residual)
    return _largest_of(found, k, new_residual), all_but_zeros, False


def select_above(
    x: Tensor, threshold: float, most: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """The entries of a = x + residual whose magnitude is at least `threshold` (positive), `most` at the most.

    Where there are more, the largest of them. The arguments are those of `select_largest`.
    """
    buffer = buffer or new_buffer(x, most)
    if x.is_meta:
        warm_up("select")
        return _first(buffer, most)
    found = select_reaching(x, threshold, buffer, residual, new_residual)
    selected = _largest_of(found, most, new_residual)
    return select_largest(x, most, buffer, residual, new_residual) if selected is None else selected


def select_in_chunks(
    x: Tensor, per_chunk: int, chunk: int, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """The `per_chunk` largest of each `chunk` entries of x + residual; of fewer at the end, as many or all.

    Args:
        buffer: is overwritten; has as many entries as are selected, or more.
        residual: as in `select_largest`, and so `new_residual`.
    """
    whole, rest = divmod(x.numel(), chunk)
    k = whole * per_chunk + min(per_chunk, rest)
    if x.is_meta:
        warm_up("select")
    elif k and numba_takes_fp32(x):
        given = _addresses(x, residual, new_residual)
        kernel = numba_kernels("select").select_in_chunks
        kernel(*given, x.numel(), per_chunk, chunk, *_buffer_addresses(buffer))
    elif k and not (
        chunk <= LARGEST_CHUNK
        and _run_triton("select.select_in_chunks", x, per_chunk, chunk, *buffer, residual, new_residual)
    ):
        reference.select_in_chunks(x, per_chunk, chunk, *buffer, residual, new_residual)
    return _first(buffer, k)


def select_reaching(
    x: Tensor, threshold: float, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:  # fmt: skip
    """All entries of a = x + residual with |a| >= threshold; None where the buffer is too small for them.

    `new_residual` becomes a, with zeros in their places; it is unfinished where None is returned.
    """
    given = [each for each in (residual, new_residual) if each is not None]
    if triton_takes_fp32(x, buffer.values, *given):
        from tacit.kernels.triton import select as triton

        count = triton.select_reaching(x, threshold, *buffer, residual, new_residual)
    elif not numba_takes(x) or math.isnan(threshold):
        count = reference.select_reaching(x, threshold, *buffer, residual, new_residual)
    elif x.dtype == torch.float32:
        at = _addresses(x, residual, new_residual)
        kernel = numba_kernels("select").select_reaching
        count, _ = kernel(*at, x.numel(), threshold, *_buffer_addresses(buffer))
    else:
        before, after = (
            (x[:0], x[:0]) if residual is None or new_residual is None else (residual, new_residual)
        )
        array, before_, after_, positions, values = _arrays(x, before, after, *buffer)
        count = numba_kernels("select").select_reaching_fp64(
            array, before_, after_, threshold, positions, values
        )
    return None if count < 0 else _first(buffer, count)


def _largest_of(found: Selection | None, k: int, new_residual: Tensor | None) -> Selection | None:
    """The k largest of what was found; all where there are no more."""
    if found is None or found.positions.numel() <= k:
        return found
    least, larger = _nth_largest(found.values, k)
    if numba_takes(found.values):
        rest = found.values[:0] if new_residual is None else new_residual
        positions, values, rest_ = _arrays(*found, rest)
        keep_largest = numba_kernels("select").keep_largest
        keep_largest(positions, values, values.dtype.type(least), k - larger, rest_)
    else:
        reference.keep_largest(found, least, k - larger, new_residual)
    return _first(found, k)


def _nth_largest(x: Tensor, n: int) -> tuple[float, int]:
    """The n-th largest magnitude, and how many are larger. NaN counts as the largest."""
    if not numba_takes(x):
        return reference.nth_largest(x, n)
    place = x.numel() - n
    array = np.abs(x.detach().numpy())
    array.partition(place)
    return float(array[place]), int(np.count_nonzero(array[place:] > array[place]))


def _run_triton(name: str, x: Tensor, *arguments: Any) -> bool:
    given = (each for each in arguments if isinstance(each, Tensor) and each.dtype != torch.int32)
    return triton_takes(x, *given) and run_triton(name, x, *arguments)


def _addresses(x: Tensor, residual: Tensor | None, new_residual: Tensor | None) -> tuple[int, int, int]:
    if residual is None or new_residual is None:
        return x.data_ptr(), 0, 0
    return x.data_ptr(), residual.data_ptr(), new_residual.data_ptr()


def _buffer_addresses(buffer: EntryBuffer) -> tuple[int, int, int]:
    return buffer.positions.data_ptr(), buffer.values.data_ptr(), buffer.positions.numel()


def _arrays(*tensors: Tensor) -> list[Any]:
    return [tensor.detach().numpy() for tensor in tensors]


def _first(buffer: EntryBuffer | Selection, count: int) -> Selection:
    return Selection(buffer.positions[:count], buffer.values[:count])
