"""Arrays at the addresses that are passed to compiled kernels: for any number of peers, without wrapping."""

from __future__ import annotations

from typing import Any

from numba import carray, njit, types
from numba.extending import intrinsic


def _pointer(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def pointer(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_uint8_pointer, _int32_pointer = _pointer(types.uint8), _pointer(types.int32)
_float32_pointer, _uint16_pointer = _pointer(types.float32), _pointer(types.uint16)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def bytes_at(address: Any, start: Any, size: Any) -> Any:
    """`size` bytes from index `start` on, of those at the address."""
    return carray(_uint8_pointer(address + start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def shorts_at(address: Any, start: Any, size: Any) -> Any:
    """`size` uint16 numbers from index `start` on, of those at the address."""
    return carray(_uint16_pointer(address + 2 * start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def floats_at(address: Any, start: Any, size: Any) -> Any:
    """`size` fp32 numbers from index `start` on, of those at the address."""
    return carray(_float32_pointer(address + 4 * start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def ints_at(address: Any, start: Any, size: Any) -> Any:
    """`size` int32 numbers from index `start` on, of those at the address."""
    return carray(_int32_pointer(address + 4 * start), size)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def float32_at(address: Any, i: Any) -> Any:
    """Number `i` of the fp32 numbers at the address."""
    return floats_at(address, i, 1)[0]
