"""`kernels.byte_planes` in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def part(words: NDArray[Any], turn: int, planes: NDArray[np.uint8]) -> None:
    """`numba.byte_planes.part`."""
    if turn:
        words = (words << 1) | (words >> (8 * words.itemsize - 1))
    planes[:] = words.byteswap().view(np.uint8).reshape(len(words), words.itemsize).T


def join(planes: NDArray[np.uint8], turn: int, words: NDArray[Any]) -> None:
    """`numba.byte_planes.join`."""
    found = np.ascontiguousarray(planes.T).view(words.dtype).reshape(-1).byteswap()
    words[:] = (found >> 1) | (found << (8 * words.itemsize - 1)) if turn else found
