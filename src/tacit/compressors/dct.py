"""Cosine transforms of short rows, for codecs that send few coefficients (DeMo)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from tacit import checks
from tacit.compressors.dense import Dense
from tacit.compressors.topk import TopK
from tacit.compressors.wrappers import Wrapper, inner_state, outer_state
from tacit.contracts import Compressor, Context, Decoded, Exchange, OneShot, Payload, State, Transmitted
from tacit.errors import ConfigError
from tacit.exchange.finite_checks import refuse_overflow
from tacit.kernels.thread_scratch import thread_scratch


@dataclass(frozen=True)
class DCT(OneShot):
    """Encode the cosine transform of each `length` entries in a row by `values`; bytes are those of `values`.

    DeMo's transform (Peng, Quesnelle & Kingma 2024, arXiv 2411.19870): orthonormal, so that the largest
    coefficients are the nearest approximation of their number. Entries at the end that fill no row are
    encoded as they are. Put `ErrorFeedback` around it, or what `values` leaves out is lost.

    Attributes:
        values: what encodes the coefficients; DeMo's are the 32 largest of each 4096.
        length: of a row; more catch longer patterns, and cost length / 2 multiplications an entry more.
    """

    values: OneShot = TopK(ratio=32 / 4096, chunk=4096)
    length: int = 64

    additive: ClassVar[bool] = False
    sliceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.whole("length", self.length, 2, 4096, "write 64")
        if not isinstance(self.values, OneShot) or self.values.varies:
            raise ConfigError(
                f"values={self.values!r} cannot encode coefficients: write a one-shot compressor of fixed "
                "length, such as TopK(ratio=0.01)"
            )

    @property
    def on_device(self) -> bool:
        return self.values.on_device

    def exempts(self, shape: torch.Size) -> bool:
        """No parameter: DeMo transforms all of them."""
        return False

    def encode(self, x: Tensor, ctx: Context) -> Payload:
        """The payload of the coefficients."""
        coefficients = ctx.scratch("coefficients", x, x.shape, x.dtype)
        if not x.is_meta:
            self._transform_(x, coefficients, back=False)
        return self.values.encode(coefficients, ctx.inside("values", out=coefficients))

    def check(self, payload: Payload, out: Tensor) -> None:
        self.values.check(payload, out)

    def decode_(self, payload: Payload, out: Tensor) -> None:
        """Decode the coefficients, and transform them back."""
        self._back_(out, lambda into: self.values.decode_(payload, into))

    def decode_add_(self, payload: Payload, out: Tensor, weight: float) -> None:
        """Decode to a buffer of the size of `out`, and add that."""
        own = torch.empty_like(out)
        self.decode_(payload, own)
        out.add_(own, alpha=weight)

    def decode_mean_(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """The mean of the coefficients, transformed back once."""
        self._back_(out, lambda into: self.values.decode_mean_(payloads, into))

    def sent(self, payload: Payload, x: Tensor) -> Transmitted:
        return Decoded(self, payload)

    def _back_(self, out: Tensor, decode_: Callable[[Tensor], None]) -> None:
        """Overwrite `out` with what `decode_` writes, transformed back."""
        coefficients = thread_scratch("coefficients", out.numel(), out.dtype, out.device)
        decode_(coefficients)
        if not out.is_meta:
            self._transform_(coefficients, out, back=True)

    def _transform_(self, x: Tensor, out: Tensor, back: bool) -> None:
        """Overwrite `out` with the transform of each row of `x`, or with its inverse."""
        whole = x.numel() - x.numel() % self.length
        wide = torch.promote_types(x.dtype, torch.float32)
        basis = _basis(self.length, wide, x.device)
        rows = x[:whole].view(-1, self.length).to(wide)
        out[:whole].view(-1, self.length).copy_(rows @ (basis if back else basis.T))
        out[whole:] = x[whole:]


@lru_cache(16)
def _basis(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthonormal DCT-II; a row for each frequency."""
    at = torch.arange(length, dtype=torch.float64, device=device)
    rows = torch.cos(math.pi / length * at[:, None] * (at + 0.5)) * math.sqrt(2 / length)
    rows[0] /= math.sqrt(2)
    return rows.to(dtype)


@dataclass(frozen=True)
class SignOfMean(Wrapper):
    """Answer with the sign of each entry of the inner compressor's mean: 1, -1, or 0 for 0.

    With SGD a step is then as long as the learning rate in every entry, as DeMo and Lion step. All that it
    wraps is as without it: what is sent, and what error feedback keeps.
    """

    @property
    def hides_nonfinite(self) -> bool:  # type: ignore[override]
        """True: NaN has no sign, and infinity has one."""
        return True

    @property
    def on_device(self) -> bool:
        return self.inner.on_device

    def exempted(self) -> Compressor:
        """The same around the inner compressor's choice, or around `Dense`: one learning rate is for all."""
        return SignOfMean(self.inner.exempted() or Dense())

    def init(self, like: Tensor) -> State:
        """The inner compressor's state."""
        return outer_state(self.inner.init(like), "inner")

    def exchange(self, x: Tensor, state: State, ctx: Context) -> Exchange:
        """The inner exchange, and then the signs of its mean."""
        done = yield from self.inner.exchange(x, inner_state(state, "inner"), ctx.inside("inner"))
        refuse_overflow(done.mean, ctx)
        if not x.is_meta:
            done.mean.sign_()
        return done._replace(state=outer_state(done.state, "inner"), finite=True)
