"""How kernels pass over tensors that no cache holds, so that each crosses the memory bus once.

A block is gone through twice: for its scale, and to encode it. The sum with the residual is formed anew for
that, from the first cache, and what is left is written once, past the caches.
"""

from __future__ import annotations

from typing import Any

from tacit.kernels.numba.jit import inline
from tacit.kernels.numba.vectors import LINE, VECTOR_BYTES, load_floats, prefetch, store, stream

LARGE = 1 << 19
"""Entries from which on a result would not stay in the caches anyway."""
AHEAD = 4096
"""Bytes between what is read and what is fetched meanwhile; of itself the processor fetches nothing while a
block is gone through once more."""


@inline
def streams(at: Any, numel: Any) -> Any:
    """Whether a tensor of this size is written past the caches, of which the address has to be aligned."""
    return numel >= LARGE and at & (LINE - 1) == 0


@inline
def fetch_ahead(at: Any) -> None:
    """Have the processor fetch what lies `AHEAD` of 64 entries."""
    for line in range(AHEAD, AHEAD + VECTOR_BYTES, LINE):
        prefetch(at + line)


@inline
def load_sum(x: Any, residual: Any, at: Any) -> Any:
    """64 entries of x + residual, or of x where `residual` is 0, from `at` bytes after the addresses on."""
    a = load_floats(x + at)
    return a + load_floats(residual + at) if residual else a


@inline
def load_and_fetch(x: Any, residual: Any, at: Any) -> Any:
    """The same; with a residual, what lies further on in both is fetched meanwhile."""
    if residual:
        fetch_ahead(x + at)
        fetch_ahead(residual + at)
    return load_sum(x, residual, at)


@inline
def write(at: Any, result: Any, past_caches: Any) -> None:
    """Write 64 entries of a result."""
    if past_caches:
        stream(at, result)
    else:
        store(at, result)
