"""Select the k entries of largest magnitude: exactly k of them, at little more than one pass over memory.

A threshold from a sample lets through a little more than k candidates; the exact choice is made among them,
and the others are put back. What is selected does not depend on the threshold, nor on which version of the
kernels runs: the k largest magnitudes; of equal ones those at the lowest positions; a NaN is smaller than
everything. They come in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tacit.kernels.dispatch import FP32, REALS, kernel, on_host
from tacit.kernels.entry_buffers import EntryBuffer, Selection, first_of, new_buffer


@kernel("x", "residual", "new_residual")
def select_largest(
    x: Tensor, k: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None, look: Callable[[], None] | None = None,
) -> Selection:  # fmt: skip
    """The `k` entries of largest magnitude of the flat tensor a = x + residual; of `x`, without `residual`.

    Args:
        buffer: overwritten; `new_buffer` makes one of the right size.
        residual: with `new_residual`, or both are None.
        new_residual: becomes a, with zeros where entries were selected.
        look: called unless all entries of a were found to be finite.
    """
    return first_of(buffer or new_buffer(x, k), k)


def select_above(
    x: Tensor, threshold: float, most: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """The entries of a = x + residual whose magnitude is at least `threshold` (positive), `most` at the most.

    Where there are more, the largest of them. The arguments are those of `select_largest`. On a device, where
    the host cannot know how many there are, the result has `most`, and the last are at -1.
    """
    buffer = buffer or new_buffer(x, most)
    if not on_host(x):
        return keep_reaching(select_largest(x, most, buffer, residual, new_residual), threshold, new_residual)
    found = select_reaching(x, threshold, buffer, residual, new_residual)
    if found is None:
        return select_largest(x, most, buffer, residual, new_residual)
    return keep_largest(found, most, new_residual)


@kernel("x", "residual", "new_residual")
def select_in_chunks(
    x: Tensor, per_chunk: int, chunk: int, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """The `per_chunk` largest of each `chunk` entries of x + residual; of fewer at the end, as many or all.

    Args:
        buffer: is overwritten; has as many entries as are selected, or more.
        residual: as in `select_largest`, and so `new_residual`.
    """
    return first_of(buffer, chunked(x.numel(), per_chunk, chunk))


def chunked(numel: int, per_chunk: int, chunk: int) -> int:
    """How many entries `select_in_chunks` selects."""
    whole, rest = divmod(numel, chunk)
    return whole * per_chunk + min(per_chunk, rest)


@kernel("x", "buffer", "residual", "new_residual", numba=REALS, triton=FP32)
def select_reaching(
    x: Tensor, threshold: float, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:  # fmt: skip
    """All entries of a = x + residual with |a| >= threshold; None where the buffer is too small for them.

    `new_residual` becomes a, with zeros in their places; it is unfinished where None is returned.
    """
    return first_of(buffer, buffer.positions.numel())


@kernel("found", numba=REALS, triton=())
def keep_largest(found: Selection, k: int, new_residual: Tensor | None) -> Selection:
    """The k largest of what was found, moved to the front; all where there are no more.

    The others are given back to `new_residual`.
    """
    return first_of(found, k)


@kernel("found", numba=(), triton=())
def keep_reaching(found: Selection, threshold: float, new_residual: Tensor | None) -> Selection:
    """On a device: those of magnitude `threshold` or more, moved to the front; the others are given back.

    There are as many still: the last are at -1, and are `-threshold`.
    """
    return found
