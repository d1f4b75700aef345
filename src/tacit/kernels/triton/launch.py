"""How Triton kernels are made and launched, and how the payloads of all peers are passed to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tacit.kernels.dispatch import LaunchError

ROWS = 8
"""Buckets that one program works on."""
UNSPECIALISED = ("first", "key0", "key1", "k", "room")
"""Arguments that are not specialised: Triton would compile anew for 1, and for multiples of 16."""


def jit(function: Callable[..., Any]) -> Any:
    """A kernel, or a function that kernels call."""
    unspecialised = [name for name in UNSPECIALISED if name in function.__annotations__]
    return triton.jit(function, do_not_specialize=unspecialised)


def launch(kernel: Any, programs: int, on: Tensor, *args: Any, **constants: Any) -> None:
    """Run `programs` programs on the device of `on`, without fused multiply-add; bf16 is passed as its bits.

    Raises:
        LaunchError: the kernel does not compile, or cannot be launched.
    """
    if programs:
        args = tuple(as_bits(each) for each in args)
        with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]
            try:
                kernel[(programs,)](*args, **constants, enable_fp_fusion=False)
            except Exception as error:  # what a compiler cannot do it says in many ways
                why = " ".join(f"{type(error).__name__}: {error}".split())
                raise LaunchError(f"{getattr(kernel, '__name__', 'kernel')}: {why[:300]}") from error


def as_bits(argument: Any) -> Any:
    """bf16 as int16: Triton's interpreter would not round as a GPU does."""
    is_bf16 = isinstance(argument, Tensor) and argument.dtype == torch.bfloat16
    return argument.view(torch.int16) if is_bf16 else argument


def launch_by_rows(
    kernel: Any, on: Tensor, bucket: int, group: int, *args: Any, rows: int = ROWS, **constants: Any
) -> None:
    """Run over the whole buckets of the flat `on`, and then over what is left, whose lanes are shorter.

    The kernel's last arguments are the first bucket, how many there are, the entries of each, and their lanes
    where `group` codes are packed together.
    """
    whole, rest = divmod(on.numel(), bucket)
    for first, count, size in ((0, whole, bucket), (whole, min(rest, 1), rest)):
        programs = -(-count // rows)
        launch(kernel, programs, on, *args, first, count, size, -(-size // group), ROWS=rows, **constants)


def philox_keys(seed: int) -> tuple[int, int]:
    """The halves of 64 bits, as signed numbers: an argument of another size would be another kernel."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


class PayloadStack(NamedTuple):
    """Payloads at equal distances: the tensors of the first, the distances in entries, and how many."""

    first: Sequence[Tensor | None]
    strides: list[int]
    peers: int


def payload_stacks(payloads: Sequence[Sequence[Tensor | None]]) -> list[PayloadStack]:
    """All payloads as one stack if they are equally far apart, as rows of a message are; else one by one."""
    strides = [_stride(column) for column in zip(*payloads, strict=True)]
    equal = [stride for stride in strides if stride is not None]
    if len(equal) == len(strides):
        return [PayloadStack(payloads[0], equal, len(payloads))]
    return [PayloadStack(payload, [0] * len(payload), 1) for payload in payloads]


def _stride(column: Sequence[Tensor | None]) -> int | None:
    tensors = [each for each in column if each is not None]
    assert all(each.is_contiguous() for each in tensors)
    gaps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(tensors)} or {0}
    gap = gaps.pop()
    size = tensors[0].element_size() if tensors else 1
    return None if gaps or gap % size else gap // size
