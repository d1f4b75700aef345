"""`kernels.fp8` by Triton: adds any number of peers in one pass, on GPUs without an 8-bit type too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from triton.language import tensor

from tacit.kernels.triton.launch import jit, launch_by_rows, payload_stacks
from tacit.kernels.triton.primitives import INFINITY, NAN, load, round_to, store

BLOCK, ROWS_AT_A_TIME = 512, 4


@jit
def decoded(code: tensor, E4M3: tl.constexpr) -> tensor:
    """The number of a byte, in fp32: its bits as those of a smaller number, times a power of two."""
    magnitude = code & 127
    if E4M3:
        number = (magnitude << 20).to(tl.float32, bitcast=True) * 2.0**120
        number = tl.where(magnitude == 127, NAN, number.to(tl.int32, bitcast=True))
    else:
        number = (magnitude << 21).to(tl.float32, bitcast=True) * 2.0**112
        number = tl.where(magnitude == 124, INFINITY, number.to(tl.int32, bitcast=True))
        number = tl.where(magnitude > 124, NAN, number)
    return (number | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@jit
def add_kernel(
    codes: tensor, scales: tensor, out: tensor, codes_step: tensor, scales_step: tensor, peers: tensor,
    weight: tensor, first: tensor, count: tensor, size: tensor, lanes: tensor,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, E4M3: tl.constexpr, FRESH: tl.constexpr,
) -> None:  # fmt: skip
    """Add `weight` times what each peer sent, decoded, in order."""
    row = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    at, mask = row.to(tl.int64)[:, None] * BLOCK + i, (row < first + count)[:, None] & (i < size)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    if not FRESH:
        total = load(out, at, mask)
    for _ in range(peers):
        number = decoded(tl.load(codes + at, mask, 0).to(tl.int32), E4M3)
        total = round_to(total + number * (tl.load(scales) * weight), out)
        codes += codes_step
        scales += scales_step
    store(out, at, total, mask)


def add_fp8_(
    payloads: Sequence[Sequence[Tensor]], dtype: torch.dtype, weight: float, out: Tensor, fresh: bool
) -> None:
    """See `kernels.fp8`."""
    for stack in payload_stacks(payloads):
        launch_by_rows(
            add_kernel, out, BLOCK, 1, *stack.first, out, *stack.strides, stack.peers, weight,
            BLOCK=BLOCK, E4M3=dtype == torch.float8_e4m3fn, FRESH=fresh, rows=ROWS_AT_A_TIME,
        )  # fmt: skip
        fresh = False
