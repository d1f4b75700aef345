"""Powers of two below a norm, at random (natural dithering: Horvath et al., MSML 2022, arXiv 1905.10988)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.levels import check_bucket
from tacit.contracts import Context, Decoded, OneShot, Payload, Transmitted
from tacit.kernels.payload_layout import bucket_count, code_bytes, pack_codes, unpack_codes
from tacit.kernels.payloads import expect_parts
from tacit.kernels.philox import uniform

_TINY, _HUGE = 2.0**-126, 3.4e38


@dataclass(frozen=True)
class NaturalDithering(OneShot):
    """Round each entry, at random, to 0 or a power of two below its bucket's largest magnitude; unbiased.

    The levels are 0 and 2^-j times that magnitude, for j from s - 1 to 0, with s = 2^(bits - 1) - 1: QSGD's
    equal steps s apart end where these have halved s times. Bytes: bits x n / 8 (of whole groups, as QSGD)
    + 4 x ceil(n / bucket), to P - 1 peers. No error feedback is needed.

    Differences from the paper: levels have a fixed number of bits; the norm is the largest magnitude (its
    p = infinity), of each `bucket` entries and not of a tensor.

    Attributes:
        bits: of a level with its sign, 2 to 5; more halve beyond fp32's precision.
        bucket: entries that share a scale, a multiple of 8.
    """

    bits: int = 4
    bucket: int = 512

    additive: ClassVar[bool] = False
    unbiased: ClassVar[bool] = True
    sliceable: ClassVar[bool] = True
    on_device: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("bits", self.bits, 2, 5, "it is the length of a level with its sign; write 4")
        check_bucket(self.bucket)

    @property
    def levels(self) -> int:
        """s, how many levels beside 0 there are."""
        return (1 << (self.bits - 1)) - 1

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed levels, one magnitude a bucket)."""
        count, size = bucket_count(x.numel(), self.bucket), self._size(x.numel())
        if x.is_meta:
            return x.new_empty(size, dtype=torch.uint8), x.new_empty(count, dtype=torch.float32)
        rows = torch.nn.functional.pad(x.float().clamp(-_HUGE, _HUGE), (0, count * self.bucket - x.numel()))
        rows = rows.view(count, self.bucket)
        scales = rows.abs().amax(dim=1)
        scales = torch.where(scales < _TINY, 0.0, scales)
        share = torch.nan_to_num(rows.abs().double() / scales.double().unsqueeze(1), posinf=0.0)
        draws = uniform(ctx.draw("dither", ctx.rank), rows.numel(), x.device).view_as(share)
        # The level below: 2^-j for j of 0 to s - 1, or 0. Up with a probability that makes the mean right.
        low = torch.exp2(torch.floor(torch.log2(share)).clamp(max=-1))
        least = 2.0 ** (1 - self.levels)
        low = torch.where(share < least, 0.0, low)
        high = torch.where(low == 0, least, 2 * low)
        taken = torch.where(draws * (high - low) < share - low, high, low)
        steps = torch.where(taken == 0, 0, self.levels + torch.log2(taken)).round().long()
        codes = steps * torch.where(rows < 0, -1, 1) + self.levels
        return pack_codes(codes.view(1, -1)[:, : x.numel()], self.bits)[:size], scales

    def _size(self, numel: int) -> int:
        return code_bytes(numel, self.bits)

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        scales = ("magnitudes", bucket_count(numel, self.bucket), torch.float32)
        expect_parts(payload, numel, ("levels", self._size(numel), torch.uint8), scales)

    def _decoded(self, payload: Payload, out: Tensor) -> Tensor:
        self.check(payload, out)
        codes, scales = payload
        steps = unpack_codes(codes, self.bits, out.numel()).view(-1) - self.levels
        each = scales.repeat_interleave(self.bucket, output_size=len(scales) * self.bucket)[: out.numel()]
        size = torch.exp2((steps.abs() - self.levels).float()) * each
        return torch.where(steps == 0, 0.0, size * steps.sign()).to(out.dtype)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        out.copy_(self._decoded(payload, out))

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        out.add_(self._decoded(payload, out), alpha=weight)

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)
