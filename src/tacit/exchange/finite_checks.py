"""Checks of what is sent for NaN and overflow, and the errors that are raised.

Where an exchange runs on a device in stream order, nothing is raised here: the largest magnitude is noted in
`Context.health`, and the session reads it when the round is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from tacit.contracts import Context, OneShot, Payload
from tacit.errors import Overflow
from tacit.kernels.dispatch import on_host
from tacit.torch_compat import largest_of_each

BLOCK = 1 << 18
"""Entries that are divided and added up at a time: they stay in the second-level cache between the two."""


def largest(x: Tensor) -> float:
    """The largest magnitude on the host: NaN where one is, 0 of nothing."""
    if not x.numel():
        return 0.0
    low, high = x.aminmax()
    return float(torch.maximum(-low, high))


def finite(x: Tensor) -> bool:
    """Whether all entries are finite, as on "meta".

    A sum tells it, unless it overflows; torch finds it four times as fast as the largest magnitude.
    """
    return x.is_meta or isfinite(x.sum()) or isfinite(largest(x))


EXTREME = 2.0**100
"""No training has magnitudes of 1e30: if a payload has one, overflow is searched for entry by entry."""


def extreme(x: Tensor) -> bool:
    """Whether it holds NaN, or a magnitude of 2^100 or more."""
    return not largest(x) < EXTREME


OVERFLOWN = 3.3e38
"""Magnitudes from this on mean an overflow, as codecs cap their scales at 3.4e38."""


def measure_(x: Tensor, out: Tensor) -> None:
    """Write the largest magnitude in `x` to `out` (one fp32 number, where `x` is): NaN or infinite if one is.

    On a GPU it is one launch, without waiting.
    """
    if not x.numel():
        out.zero_()
    elif x.dtype == torch.float64:
        out.copy_(torch.linalg.vector_norm(x.reshape(-1), torch.inf).view(out.shape))
    else:
        at = out.view(())
        torch.linalg.vector_norm(x.reshape(-1), torch.inf, dtype=torch.float32, out=at)


def divide_(flat: Tensor, by: float, finite_probe: Tensor | None) -> None:
    """Divide in place; `finite_probe` (one element), if any, tells whether all quotients are finite.

    On a device it becomes their largest magnitude. On the host their sum is added to it, or their largest
    magnitude where the sum overflows, as several exchanges may share one probe.
    """
    flat = flat.view(-1)
    if finite_probe is None or not on_host(flat):
        flat.div_(by)
        if finite_probe is not None:
            measure_(flat, finite_probe)
        return
    total = torch.zeros((), dtype=torch.float32)
    for block in torch.split(flat, BLOCK):
        total += (block if by == 1 else block.div_(by)).sum()
    finite_probe.add_(total if total.isfinite() else largest(flat))


def probe_(x: Tensor, finite_probe: Tensor) -> None:
    """Make `finite_probe` (one element) not finite if `x` is not: adds its sum; on a device as `divide_`."""
    if on_host(x):
        finite_probe.add_(x.sum())
    else:
        measure_(x, finite_probe)


def note_magnitude(health: Tensor, *tensors: Tensor) -> None:
    """Raise `health` (one fp32 number on their device) to the largest magnitude in the tensors; NaN stays."""
    if len(tensors) > 2 and len({each.dtype for each in tensors}) == 1 and all(map(Tensor.numel, tensors)):
        most = torch.stack(largest_of_each([*tensors])).amax(0, keepdim=True)  # as few launches for many
        torch.maximum(health, most, out=health)
        return
    for x in tensors:
        found = health.new_empty(health.shape)
        measure_(x, found)
        torch.maximum(health, found, out=health)


def refuse_overflow(x: Tensor, ctx: Context) -> None:
    """Refuse NaN and infinity in a result of finite entries; if there is `ctx.health`, note them there.

    Raises:
        Overflow: names the bucket.
    """
    if x.is_meta:
        return
    if ctx.health is not None:
        note_magnitude(ctx.health, x)
        return
    if not finite(x) and not ctx.knows_of_nonfinite:  # else a rank reports its NaN
        raise overflow(ctx.name, ctx.begun + ctx.step, x.dtype)


def overflow(name: str, step: int, dtype: torch.dtype, where: str = "") -> Overflow:
    """The error for a bucket in which finite entries became infinite; `where`: " of rank 1", if known."""
    return Overflow(
        f"in the bucket of {name}, in step {step}, finite entries{where} became too large to be sent or kept "
        f"as residual: beyond {torch.finfo(dtype).max:.3g}, the largest {dtype}. Nothing of this step has "
        "been applied or kept. Lower the learning rate, or put Clip around the compressor"
    )


def check_payloads(
    codec: OneShot, payloads: Sequence[Payload], given: Sequence[Tensor], ctx: Context
) -> None:
    """Check payloads that may hide entries which became infinite in encoding.

    Args:
        given: the tensors that were encoded.

    Raises:
        Overflow: one of `given` or of the payloads has NaN or infinity.
    """
    if given[0].is_meta:
        return
    noted: list[Tensor] = []
    for payload, x in zip(payloads, given, strict=True):
        parts = [part for part in payload if part.is_floating_point()]
        if ctx.health is not None:
            noted += parts
            if x.dtype.itemsize < 4 or not parts:
                noted.append(x)  # else infinite entries show in the payload
        elif any(map(extreme, parts)) if parts else codec.may_overflow(payload):
            if ctx.look is not None:
                ctx.look()
            for tensor in (x, *parts):
                refuse_overflow(tensor, ctx)
    if ctx.health is not None:
        note_magnitude(ctx.health, *noted)
