"""Two bytes or one for each entry, by rounding to a shorter floating-point type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from tacit import checks
from tacit.contracts import AddingCodec, Context, OneShot, Payload, Rounded, Transmitted
from tacit.kernels.dispatch import pieces
from tacit.kernels.fp8 import add_fp8_, encode_fp8
from tacit.kernels.payloads import expect_parts

PIECE = 1 << 14
"""Entries that are widened at a time on the host: they stay in the second-level cache."""


class Cast(OneShot):
    """Round to a type of two bytes; the collective adds up in it. Bytes: 2 (P - 1) / P x 2n a rank."""

    sliceable: ClassVar[bool] = True
    additive: ClassVar[bool] = True
    hides_nonfinite: ClassVar[bool] = False
    inline: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    entrywise: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype]

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: rounding does as little harm to biases as to weights."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """`x` rounded to nearest even: n entries of two bytes."""
        wire = ctx.scratch("wire", x, x.shape, self.dtype)
        return (wire.copy_(x),)

    def check(self, payload: Payload, out: Tensor) -> None:
        expect_parts(payload, out.numel(), ("entries", out.numel(), self.dtype))

    def decode_(self, payload: Payload, out: Tensor) -> None:
        self.check(payload, out)
        out.copy_(payload[0])

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        self.check(payload, out)
        for piece in pieces(out, PIECE):  # of mixed types torch would widen all of it at once
            out[piece].add_(payload[0][piece].to(out.dtype), alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        """`x` rounded again on demand, as the mean has overwritten the payload."""
        return Rounded(x, self.dtype)


@dataclass(frozen=True)
class BF16(Cast):
    """Send bfloat16: the range of fp32, 8 bits of precision. Bytes: 2 (P - 1) / P x 2n a rank.

    The collective adds in bfloat16, too; Gloo and NCCL both can, although torch's own `bf16_compress_hook`
    refuses Gloo. Survey (arXiv 2003.03009), quantization.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclass(frozen=True)
class FP16(Cast):
    """Send IEEE half precision: 11 bits of precision, from 6e-8 to 65504. Bytes: 2 (P - 1) / P x 2n a rank.

    Eight times as fine as `BF16`, in a smaller range: entries below 6e-5 lose bits, those below 3e-8 are lost
    (scale the loss, or put `ErrorFeedback` around it), and one beyond 65504 becomes infinity, which is an
    error on every rank, or with a GradScaler a skipped step. Survey (arXiv 2003.03009), quantization.
    """

    dtype: ClassVar[torch.dtype] = torch.float16


@dataclass(frozen=True)
class FP8(AddingCodec):
    """Send 8-bit floating point, scaled so that the bucket's largest magnitude is the type's: n + 4 bytes.

    To P - 1 peers: no collective of Gloo adds up fp8, so bytes are gathered and added up in the type of `x`.
    That moves fewer bytes than fp32 among up to 7 peers, than bf16 up to 3. Each rank has another scale.
    Difference from the OCP formats' use in training: one scale a bucket and step, not one with a delay.

    Attributes:
        format: "e4m3": 4 bits of precision, over 5 decades. "e5m2": 3 bits, over 9 decades.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    sliceable: ClassVar[bool] = True
    shows_nonfinite: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of("format", self.format, tuple(_FORMATS))

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(n bytes, scale of one element)."""
        dtype = _FORMATS[self.format]
        wire = ctx.scratch("wire", x, x.shape, torch.uint8)
        if x.is_meta:  # where each operation below takes torch a millisecond
            encode_fp8(x, x, dtype, wire)
            return wire, x.new_empty(1, dtype=torch.float32)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = _largest(x).to(wide).clamp(max=_HUGE).div(torch.finfo(dtype).max).float().view(1)
        inverse = torch.where(scale >= _TINY, 1 / scale, 0.0)
        encode_fp8(x, inverse, dtype, wire)
        return wire, scale

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        expect_parts(payload, numel, ("bytes", numel, torch.uint8), ("scale", 1, torch.float32))

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_fp8_(payloads, _FORMATS[self.format], weight, out, fresh)


_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_TINY, _HUGE = 2.0**-126, 3.4e38
"""The smallest scale whose inverse is finite; the largest magnitude that the scale counts with."""


def _largest(x: Tensor) -> Tensor:
    low, high = x.aminmax()
    return torch.maximum(-low, high)
