"""`kernels.select` in plain torch: on a device, where the host waits for nothing, and faster on the host."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tacit.kernels import select as front
from tacit.kernels.dispatch import on_host
from tacit.kernels.entry_buffers import (
    MARGIN,
    RUN,
    EntryBuffer,
    Selection,
    first_of,
    new_buffer,
    sample_rank,
    sample_size,
    sample_step,
)
from tacit.kernels.select import chunked

PIECE = 1 << 18
"""Entries that one pass works on at a time: 1 MiB of fp32, within a second-level cache."""


# ---- on any device, without a look at a value -----------------------------------------------------------


def select_largest(
    x: Tensor, k: int, buffer: EntryBuffer | None = None, residual: Tensor | None = None,
    new_residual: Tensor | None = None, look: Callable[[], None] | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`."""
    buffer = buffer or new_buffer(x, k)
    found = first_of(buffer, k)
    if on_host(x):
        found = _by_attempts(x, k, buffer, residual, new_residual) if k else found
    else:
        a = _sum(x, residual, new_residual)
        _write(a, largest_places(a, k).sort().values, buffer, new_residual)
    if look is not None:
        look()
    return found


def select_in_chunks(
    x: Tensor, per_chunk: int, chunk: int, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection:  # fmt: skip
    """See `kernels.select`."""
    a = _sum(x, residual, new_residual)
    whole = a.numel() - a.numel() % chunk
    found = []
    for first, rows in ((0, a[:whole].view(-1, chunk)), (whole, a[whole:].view(1, -1))):
        if rows.numel():
            places = largest_places(rows, min(per_chunk, rows.shape[1])).sort().values
            begin = torch.arange(len(rows), device=x.device).mul_(chunk).add_(first)
            found.append((places + begin.unsqueeze(1)).view(-1))
    if found:
        _write(a, torch.cat(found), buffer, new_residual)
    return first_of(buffer, chunked(x.numel(), per_chunk, chunk))


def largest_places(a: Tensor, k: int) -> Tensor:
    """Where the k largest magnitudes are along the last dimension, in any order.

    On CUDA `torch.topk` takes equal ones from the lowest positions on, which the tests hold it to; elsewhere
    a stable sort does.
    """
    return first_largest(a.abs().nan_to_num_(nan=-1.0, posinf=math.inf), k)


def first_largest(magnitudes: Tensor, k: int) -> Tensor:
    """`largest_places` of magnitudes."""
    if magnitudes.is_cuda:
        return torch.topk(magnitudes, k, sorted=False).indices
    return magnitudes.sort(descending=True, stable=True).indices[..., :k]


def keep_reaching(found: Selection, threshold: float, new_residual: Tensor | None) -> Selection:
    """See `kernels.select`."""
    positions, values = found
    reaches = values.abs() >= threshold
    if new_residual is not None:
        new_residual.index_copy_(0, positions.long(), torch.where(reaches, 0.0, values))
    last = torch.iinfo(positions.dtype).max
    rising, order = torch.where(reaches, positions, last).sort()
    return Selection(rising.masked_fill(rising == last, -1), torch.where(reaches, values, -threshold)[order])


def _sum(x: Tensor, residual: Tensor | None, new_residual: Tensor | None) -> Tensor:
    return x if residual is None or new_residual is None else torch.add(x, residual, out=new_residual)


def _write(a: Tensor, index: Tensor, buffer: EntryBuffer, new_residual: Tensor | None) -> None:
    buffer.positions[: index.numel()] = index
    torch.index_select(a, 0, index, out=buffer.values[: index.numel()])
    if new_residual is not None:
        new_residual.index_fill_(0, index, 0.0)


# ---- on the host ----------------------------------------------------------------------------------------


def _by_attempts(
    x: Tensor, k: int, buffer: EntryBuffer, residual: Tensor | None, new_residual: Tensor | None
) -> Selection:
    """`select_largest` by thresholds that are guessed, with more effort, and then without any."""
    for effort in (1, 16):
        threshold, all_but_zeros = guess_threshold(x, residual, k, effort)
        found = front.select_reaching(x, threshold, buffer, residual, new_residual)
        found = found and front.keep_largest(found, k, new_residual)
        if found is not None and all_but_zeros and found.positions.numel() < k:
            found = fill_with_zeros(found, k, x, residual, new_residual)
        if found is not None and found.positions.numel() == k:
            return found
        if sample_size(x.numel(), effort) == x.numel():
            break
    select_by_kthvalue(x, k, buffer, residual, new_residual)
    return first_of(buffer, k)


def select_reaching(
    x: Tensor, threshold: float, buffer: EntryBuffer, residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:  # fmt: skip
    """See `kernels.select`; in pieces that stay in the cache."""
    positions, values = buffer
    count = 0
    for start in range(0, x.numel(), PIECE):
        piece = x[start : start + PIECE]
        if residual is not None and new_residual is not None:
            rest = new_residual[start : start + PIECE]
            piece = torch.add(piece, residual[start : start + PIECE], out=rest)
        index = piece.abs().ge(threshold).nonzero().view(-1)
        after = count + index.numel()
        if after + MARGIN > positions.numel():
            return None
        positions[count:after] = index + start
        torch.index_select(piece, 0, index, out=values[count:after])
        if new_residual is not None:
            piece[index] = 0
        count = after
    return first_of(buffer, count)


def guess_threshold(x: Tensor, residual: Tensor | None, k: int, effort: int) -> tuple[float, bool]:
    """A threshold above 0 that k entries or a few more reach; and whether all but zeros reach it."""
    least = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    entries = sample(x, effort)
    if residual is not None:
        entries = entries + sample(residual, effort)
    rank = sample_rank(x.numel(), k, entries.numel())
    if rank == entries.numel() < x.numel():
        return least, True
    threshold, _ = nth_largest(entries.reshape(-1), rank)
    return (threshold, False) if not threshold < least else (least, True)


def sample(x: Tensor, effort: int) -> Tensor:
    """Runs of neighbours at equal distances, as a view; all of a tensor that is small."""
    step = sample_step(x.numel(), effort)
    if step <= RUN:
        return x
    return x.as_strided(((x.numel() - RUN) // step + 1, RUN), (step, 1), x.storage_offset())


def nth_largest(x: Tensor, n: int) -> tuple[float, int]:
    """The n-th largest magnitude, and how many are larger. NaN counts as the largest."""
    magnitudes = x.abs()
    nth = torch.kthvalue(magnitudes, x.numel() - n + 1).values
    return float(nth), int((magnitudes > nth).sum())


def keep_largest(found: Selection, k: int, new_residual: Tensor | None) -> Selection:
    """See `kernels.select`."""
    if found.positions.numel() > k:
        least, larger = nth_largest(found.values, k)
        keep_above(found, least, k - larger, new_residual)
    return first_of(found, k)


def keep_above(found: Selection, least: float, equal: int, new_residual: Tensor | None) -> None:
    """Move what is above `least`, and the first `equal` that equal it, to the front.

    The others are put back into `new_residual`.
    """
    ties = found.values.abs() == least
    keep = (found.values.abs() > least) | (ties & (ties.cumsum(0) <= equal))
    if new_residual is not None:
        new_residual[found.positions[~keep].long()] = found.values[~keep]
    kept = int(keep.sum())
    found.positions[:kept] = found.positions[keep]
    found.values[:kept] = found.values[keep]


def fill_with_zeros(
    found: Selection, k: int, x: Tensor, residual: Tensor | None, new_residual: Tensor | None
) -> Selection | None:
    """If fewer than k are found, and all others are zero: with the first zeros; None where one is NaN."""
    free = torch.ones(k, dtype=torch.bool, device=x.device)
    free[found.positions[found.positions < k].long()] = False
    first = free.nonzero().view(-1)[: k - found.positions.numel()]
    zeros = x[first] if residual is None else x[first] + residual[first]
    if bool(zeros.isnan().any()):
        return None
    if new_residual is not None:
        new_residual[first] = 0
    positions, order = torch.cat([found.positions, first.to(torch.int32)]).sort()
    return Selection(positions, torch.cat([found.values, zeros])[order])


def select_by_kthvalue(
    x: Tensor, k: int, buffer: EntryBuffer, residual: Tensor | None, new_residual: Tensor | None
) -> None:
    """`kernels.select.select_largest`, for any entries: the slow algorithm on the host."""
    a = _sum(x, residual, new_residual)
    magnitudes = a.abs().nan_to_num_(nan=-1.0, posinf=math.inf)
    least = float(torch.kthvalue(magnitudes, magnitudes.numel() - k + 1).values)
    above = (magnitudes > least).nonzero().view(-1)
    equal = (magnitudes == least).nonzero().view(-1)[: k - above.numel()]
    _write(a, torch.cat([above, equal]).sort().values, buffer, new_residual)
