"""What compressors share that round to a few levels at random."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contracts import AddingCodec, Context, Payload
from tacit.errors import ConfigError
from tacit.kernels.levels import add_levels_, quantize
from tacit.kernels.payload_layout import bucket_count, code_bytes
from tacit.kernels.payloads import expect_parts


def check_bucket(bucket: int) -> None:
    """Raise a `ConfigError` unless `bucket` is a power of two from 64 to 65536."""
    if not (type(bucket) is int and 64 <= bucket <= 1 << 16 and bucket & (bucket - 1) == 0):
        raise ConfigError(
            f"bucket={bucket!r} is not a power of two from 64 to 65536: it is the number of entries that "
            "share a scale; write 512"
        )


class StochasticLevels(AddingCodec):
    """Send a level of a few bits for each entry, and a unit for each bucket."""

    sliceable: ClassVar[bool] = True
    shows_nonfinite: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    on_device: ClassVar[bool] = True
    bucket: int

    @property
    @abstractmethod
    def width(self) -> int:
        """The bits of a level."""

    @property
    @abstractmethod
    def top(self) -> float:
        """What the largest level stands for: `clip` of `kernels.levels.quantize`."""

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """(packed levels, one unit for each bucket)."""
        codes = ctx.scratch("codes", x, (code_bytes(x.numel(), self.width),), torch.uint8)
        units = ctx.scratch("units", x, (bucket_count(x.numel(), self.bucket),), torch.float32)
        quantize(x, self.width, self.bucket, self.top, ctx.draw("levels", ctx.rank), codes, units)
        return codes, units

    def check(self, payload: Payload, out: Tensor) -> None:
        numel = out.numel()
        levels = ("levels", code_bytes(numel, self.width), torch.uint8)
        expect_parts(payload, numel, levels, ("units", bucket_count(numel, self.bucket), torch.float32))

    def add_(self, payloads: Sequence[Payload], weight: float, out: Tensor, fresh: bool) -> None:
        add_levels_(payloads, self.width, self.bucket, weight, out, fresh)
