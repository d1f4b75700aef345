"""Arrays given to compiled kernels by their addresses, so that one signature takes any number of peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor


def address(tensor: Tensor) -> int:
    """Where this (contiguous) tensor begins; keep it alive as long."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Any:
    """Where these tensors begin, as int64."""
    return np.array([address(tensor) for tensor in tensors], dtype=np.int64)


def _pointer(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_uint8_pointer, _int32_pointer = _pointer(types.uint8), _pointer(types.int32)
_float32_pointer = _pointer(types.float32)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def bytes_at(address: Any, start: Any, size: Any) -> Any:
    """`size` bytes from the `start`-th on, of those at the address."""
    return carray(_uint8_pointer(address + start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def floats_at(address: Any, start: Any, size: Any) -> Any:
    """`size` fp32 numbers from the `start`-th on, of those at the address."""
    return carray(_float32_pointer(address + 4 * start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def ints_at(address: Any, start: Any, size: Any) -> Any:
    """`size` numbers of int32 from the `start`-th on, of those at the address."""
    return carray(_int32_pointer(address + 4 * start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def float32_at(address: Any, i: Any) -> Any:
    """The `i`-th of the fp32 numbers at the address."""
    return floats_at(address, i, 1)[0]
