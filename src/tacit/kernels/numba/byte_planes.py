"""`kernels.byte_planes` by numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from tacit.kernels.numba.jit import compile_now


def _part(words: Any, turn: Any, planes: Any) -> None:
    """The bytes of each word, the highest in the first plane; `turn`: its sign is moved to the lowest bit."""
    width = planes.shape[0]
    sign, up = np.uint64(8 * width - 1), np.uint64(turn)
    for j in range(width):
        plane, shift = planes[j], np.uint64(8 * (width - 1 - j))
        for i in range(words.shape[0]):
            word = np.uint64(words[i])
            word = (word << up) | ((word >> sign) & up)
            plane[i] = np.uint8((word >> shift) & np.uint64(255))


def _join(planes: Any, turn: Any, words: Any) -> None:
    """`_part`, back."""
    width = planes.shape[0]
    sign, up = np.uint64(8 * width - 1), np.uint64(turn)
    for i in range(words.shape[0]):
        word = np.uint64(0)
        for j in range(width):
            word = (word << np.uint64(8)) | np.uint64(planes[j, i])
        words[i] = (word >> up) | ((word & up) << sign)


_PLANES = "uint8[:,::1]"
_WORDS = ("uint16[::1]", "uint32[::1]", "uint64[::1]")
part = compile_now(_part, [f"void({words}, int64, {_PLANES})" for words in _WORDS])
join = compile_now(_join, [f"void({_PLANES}, int64, {words})" for words in _WORDS])
