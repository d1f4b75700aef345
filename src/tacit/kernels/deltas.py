"""What rounds of parameters add and subtract; on the host in one pass, where numba is loaded already."""

from __future__ import annotations

from torch import Tensor

from tacit.kernels.dispatch import active_backend, kernel, numba_is_loaded, numba_kernels


def prepare() -> None:
    """Compile the kernels now, if numba is loaded, so that the first round need not."""
    if numba_is_loaded() and active_backend() == "numba":
        numba_kernels("deltas")


@kernel("b", "out", "also", triton=(), loads_numba=False)
def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """Write a - b to `out`, and to `also`; all of one shape.

    `a` may be in channels-last, and `out` of a shorter type.
    """


@kernel("local", "anchor", "given", triton=(), loads_numba=False)
def add_steps_(local: Tensor, params: Tensor, anchor: Tensor, given: Tensor) -> None:
    """Add `params - anchor - given` to `local`: for a late answer, the steps since the round started.

    `params` may be in channels-last.
    """


@kernel("anchor", "mean", "local", triton=(), loads_numba=False)
def move_(anchor: Tensor, mean: Tensor | None, params: Tensor, local: Tensor | None = None) -> None:
    """Add `mean`, if there is one, to the anchor, and write the sum of anchor and `local` to `params`.

    `params` may be in channels-last.
    """


@kernel("anchor", "mean", triton=(), loads_numba=False)
def move_anchor_(anchor: Tensor, mean: Tensor, params: Tensor) -> None:
    """Add `mean` to the anchor, and overwrite `mean` with how far `params` are from the anchor before.

    `params` may be in channels-last.
    """
