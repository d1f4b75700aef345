"""Error feedback: what a payload leaves out is added to what is encoded next.

The residual is stored by a wrapper (`compressors.ErrorFeedback`), by a topology for its means, and by a
server for its answers. The arithmetic on it is here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.contracts import (
    Context,
    Difference,
    Exact,
    Factors,
    FusedCodec,
    OneShot,
    Payload,
    ReduceEncoded,
    Rounded,
    Spans,
    Transmitted,
    add_rescaled,
    cut_factors,
    formed,
)
from tacit.exchange.finite_checks import check_payloads


def encoded(request: ReduceEncoded, part: str = "") -> Payload:
    """The payload of a request's tensor.

    With error feedback the residual is added first, and `request.new_residual` then holds what the payload
    leaves out. `request.x` must stay as it is until all is encoded.

    Args:
        part: names the buffers, so that several parts can be encoded before any is sent.

    Raises:
        PayloadError: the payload has other parts than peers expect.
        Overflow: finite entries became infinite in the sum or in the payload.
    """
    payload, given = _unchecked(request, 0, request.x.numel(), part)
    if request.codec.hides_nonfinite:
        check_payloads(request.codec, [payload], [given], request.ctx)
    return payload


def encoded_spans(request: ReduceEncoded, spans: Spans, parts: Sequence[str]) -> tuple[Payload, ...]:
    """`encoded` of each of these spans of a request's tensor by itself; `parts` name their buffers."""
    each = [_unchecked(request, *span, part) for span, part in zip(spans, parts, strict=True)]
    payloads, given = zip(*each, strict=True)
    if request.codec.hides_nonfinite:
        check_payloads(request.codec, payloads, given, request.ctx)
    return payloads


def _unchecked(request: ReduceEncoded, start: int, stop: int, part: str) -> tuple[Payload, Tensor]:
    """The payload of the entries from `start` to `stop`, and what shows whether they were finite."""
    ctx = request.ctx.inside(part) if part else request.ctx
    x, codec = request.x[start:stop], request.codec
    if request.residual is None or request.new_residual is None:
        return formed(codec, codec.encode(x, ctx), x), x
    residual, new_residual = request.residual[start:stop], request.new_residual[start:stop]
    factors = request.ctx.rescale and cut_factors(request.ctx.rescale, start, stop)
    if isinstance(codec, FusedCodec) and not factors and new_residual.dtype == x.dtype:
        return codec.encode(x, ctx, residual, new_residual), new_residual
    add_rescaled(x, residual, factors, new_residual)
    return _encode_sum(codec, new_residual, x, ctx), new_residual


def _encode_sum(codec: OneShot, total: Tensor, x: Tensor, ctx: Context) -> Payload:
    """Encode `total` in the type of `x`, and overwrite it with what the payload leaves out."""
    if total.dtype == x.dtype:
        payload = formed(codec, codec.encode(total, ctx), x, apart_from=total)
        codec.sent(payload, total).subtract_from_(total)
        return payload
    given = ctx.scratch("given", x, x.shape, x.dtype).copy_(total)
    payload = formed(codec, codec.encode(given, ctx), x, apart_from=given)
    codec.decode_(payload, given)
    total.sub_(given)
    return payload


def withheld_(
    codec: OneShot, whole: Payload, sent: Payload, new_residual: Tensor, dtype: torch.dtype
) -> None:
    """Add to the residual what a payload holds and what was `sent` of it does not."""
    rest = torch.zeros(new_residual.shape, dtype=dtype, device=new_residual.device)
    codec.decode_add_(whole, rest, 1.0)
    codec.decode_add_(sent, rest, -1.0)
    new_residual.add_(rest)


def transmitted(request: ReduceEncoded, payload: Payload) -> Transmitted:
    """What the peers decode from `payload`, which encodes all of `request.x`."""
    sent = request.codec.sent(payload, request.x)
    if request.residual is None or request.new_residual is None:
        return sent
    return lasting(sent, request.x, request.residual, request.new_residual, request.ctx.rescale)


def lasting(
    sent: Transmitted, x: Tensor, before: Tensor, after: Tensor, factors: Factors = ()
) -> Transmitted:
    """`sent`; as a `Difference` if it refers to a tensor that the residual `after` has overwritten."""
    return Difference(x, before, after, factors) if isinstance(sent, Exact | Rounded) else sent
