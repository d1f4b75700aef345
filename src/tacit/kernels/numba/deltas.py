"""`kernels.deltas` by numba: each tensor crosses the memory bus once.

A parameter in channels-last lies in another order than what travels. It is turned, filter by filter, in the
first cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tacit.kernels.dispatch import address
from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.passes import fetch_ahead, streams, write
from tacit.kernels.numba.pointers import floats_at
from tacit.kernels.numba.vectors import LANES, VECTOR_BYTES, load_floats, settle, store
from tacit.kernels.reference import deltas as reference


@inline
def load(at: Any) -> Any:
    """64 entries; those further on are fetched meanwhile."""
    fetch_ahead(at)
    return load_floats(at)


@inline
def turn(at: Any, channels: Any, area: Any, turned: Any) -> None:
    """Read a filter in channels-last to `turned`, channel by channel."""
    here = floats_at(at, 0, channels * area)
    for k in range(area):
        for c in range(channels):
            turned[c * area + k] = here[k * channels + c]


@inline
def turn_back(turned: Any, channels: Any, area: Any, at: Any) -> None:
    """`turn`, back."""
    here = floats_at(at, 0, channels * area)
    for k in range(area):
        for c in range(channels):
            here[k * channels + c] = turned[c * area + k]


# ---- one span -------------------------------------------------------------------------------------


@inline
def subtract_here(a: Any, b: Any, out: Any, also: Any, numel: Any, whole_numel: Any) -> None:
    """`_subtract`, in one order of memory, for a span of a tensor with `whole_numel` entries."""
    whole, past_caches, also_past = numel // LANES, streams(out, whole_numel), streams(also, whole_numel)
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        difference = load(a + at) - load(b + at)
        write(out + at, difference, past_caches)
        if also:
            write(also + at, difference, also_past)
    one, other, target = floats_at(a, 0, numel), floats_at(b, 0, numel), floats_at(out, 0, numel)
    second = floats_at(also, 0, numel if also else 0)
    for i in range(whole * LANES, numel):
        target[i] = one[i] - other[i]
        if also:
            second[i] = target[i]


@inline
def add_steps_here(local: Any, params: Any, anchor: Any, given: Any, numel: Any) -> None:
    """`_add_steps`, in one order of memory."""
    whole = numel // LANES
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        since = ((load(local + at) + load(params + at)) - load(anchor + at)) - load(given + at)
        store(local + at, since)
    mine, now = floats_at(local, 0, numel), floats_at(params, 0, numel)
    common, before = floats_at(anchor, 0, numel), floats_at(given, 0, numel)
    for i in range(whole * LANES, numel):
        mine[i] = ((mine[i] + now[i]) - common[i]) - before[i]


@inline
def move_here(anchor: Any, mean: Any, local: Any, params: Any, numel: Any, whole_numel: Any) -> None:
    """`_move`, in one order of memory; `whole_numel` is 0 where `params` is to be turned back."""
    whole, past_caches = numel // LANES, streams(params, whole_numel)
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        moved = load(anchor + at)
        if mean:
            moved = moved + load(mean + at)
            store(anchor + at, moved)
        write(params + at, moved + load(local + at) if local else moved, past_caches)
    common, put = floats_at(anchor, 0, numel), floats_at(params, 0, numel)
    by, mine = floats_at(mean, 0, numel if mean else 0), floats_at(local, 0, numel if local else 0)
    for i in range(whole * LANES, numel):
        if mean:
            common[i] += by[i]
        put[i] = common[i] + mine[i] if local else common[i]


@inline
def move_anchor_here(anchor: Any, mean: Any, params: Any, numel: Any) -> None:
    """`_move_anchor`, in one order of memory."""
    whole = numel // LANES
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        before = load(anchor + at)
        store(anchor + at, before + load(mean + at))
        store(mean + at, load(params + at) - before)
    common, by, now = floats_at(anchor, 0, numel), floats_at(mean, 0, numel), floats_at(params, 0, numel)
    for i in range(whole * LANES, numel):
        delta = now[i] - common[i]
        common[i] += by[i]
        by[i] = delta


# ---- of a whole tensor ----------------------------------------------------------------------------------


def _subtract(a: Any, b: Any, out: Any, also: Any, numel: Any, channels: Any, area: Any) -> None:
    """`deltas.subtract` by address; `also` is 0 where there is none, `area` where `a` is not to be turned."""
    if area == 0:
        subtract_here(a, b, out, also, numel, numel)
    else:
        turned = np.empty(channels * area, np.float32)
        for at in range(0, 4 * numel, turned.nbytes):
            turn(a + at, channels, area, turned)
            second = also + at if also else also
            subtract_here(turned.ctypes.data, b + at, out + at, second, turned.size, numel)
    settle()


def _add_steps(
    local: Any, params: Any, anchor: Any, given: Any, numel: Any, channels: Any, area: Any
) -> None:
    """`deltas.add_steps_` by address."""
    if area == 0:
        add_steps_here(local, params, anchor, given, numel)
    else:
        turned = np.empty(channels * area, np.float32)
        for at in range(0, 4 * numel, turned.nbytes):
            turn(params + at, channels, area, turned)
            add_steps_here(local + at, turned.ctypes.data, anchor + at, given + at, turned.size)


def _move(anchor: Any, mean: Any, local: Any, params: Any, numel: Any, channels: Any, area: Any) -> None:
    """`deltas.move_` by address; `mean` and `local` are 0 where there is none."""
    if area == 0:
        move_here(anchor, mean, local, params, numel, numel)
    else:
        turned = np.empty(channels * area, np.float32)
        for at in range(0, 4 * numel, turned.nbytes):
            mine, by = local + at if local else local, mean + at if mean else mean
            move_here(anchor + at, by, mine, turned.ctypes.data, turned.size, 0)
            turn_back(turned, channels, area, params + at)
    settle()


def _move_anchor(anchor: Any, mean: Any, params: Any, numel: Any, channels: Any, area: Any) -> None:
    """`deltas.move_anchor_` by address."""
    if area == 0:
        move_anchor_here(anchor, mean, params, numel)
    else:
        turned = np.empty(channels * area, np.float32)
        for at in range(0, 4 * numel, turned.nbytes):
            turn(params + at, channels, area, turned)
            move_anchor_here(anchor + at, mean + at, turned.ctypes.data, turned.size)


_SUBTRACT = compile_now(_subtract, [f"void({', '.join(['int64'] * 7)})"])
_ADD_STEPS = compile_now(_add_steps, [f"void({', '.join(['int64'] * 7)})"])
_MOVE = compile_now(_move, [f"void({', '.join(['int64'] * 7)})"])
_MOVE_ANCHOR = compile_now(_move_anchor, [f"void({', '.join(['int64'] * 6)})"])


def subtract(a: Tensor, b: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """See `kernels.deltas`."""
    order = _order(a)
    if order is None:
        reference.subtract(a, b, out, also)
        return
    _SUBTRACT(a.data_ptr(), b.data_ptr(), out.data_ptr(), address(also), a.numel(), *order)


def add_steps_(local: Tensor, params: Tensor, anchor: Tensor, given: Tensor) -> None:
    """See `kernels.deltas`."""
    order = _order(params)
    if order is None:
        reference.add_steps_(local, params, anchor, given)
        return
    others = anchor.data_ptr(), given.data_ptr(), local.numel()
    _ADD_STEPS(local.data_ptr(), params.data_ptr(), *others, *order)


def move_anchor_(anchor: Tensor, mean: Tensor, params: Tensor) -> None:
    """See `kernels.deltas`."""
    order = _order(params)
    if order is None:
        reference.move_anchor_(anchor, mean, params)
        return
    _MOVE_ANCHOR(anchor.data_ptr(), mean.data_ptr(), params.data_ptr(), anchor.numel(), *order)


def move_(anchor: Tensor, mean: Tensor | None, params: Tensor, local: Tensor | None = None) -> None:
    """See `kernels.deltas`."""
    order = _order(params)
    if order is None:
        reference.move_(anchor, mean, params, local)
        return
    given = anchor.data_ptr(), address(mean), address(local)
    _MOVE(*given, params.data_ptr(), anchor.numel(), *order)
    increment_version(params)


def _order(params: Tensor) -> tuple[int, int] | None:
    """Channels and area of filters in channels-last, zeros of what lies in one order; None of others."""
    if params.dtype != torch.float32 or not params.is_cpu:
        return None
    if params.is_contiguous():
        return 0, 0
    if params.dim() == 4 and params.is_contiguous(memory_format=torch.channels_last):
        return params.shape[1], params.shape[2] * params.shape[3]
    return None
