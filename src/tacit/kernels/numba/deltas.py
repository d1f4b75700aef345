"""`kernels.deltas` by numba: each tensor crosses the memory bus once."""

from __future__ import annotations

from typing import Any

from tacit.kernels.numba.jit import compile_now, inline
from tacit.kernels.numba.pointers import floats_at
from tacit.kernels.numba.residuals import fetch_ahead, keep, streams
from tacit.kernels.numba.vectors import LANES, VECTOR_BYTES, load_floats, settle, store


@inline
def load(at: Any) -> Any:
    """64 entries; those further on are fetched meanwhile."""
    fetch_ahead(at)
    return load_floats(at)


def _subtract(a: Any, b: Any, out: Any, also: Any, numel: Any) -> None:
    """`deltas.subtract` by address; `also` is 0 where there is none."""
    whole, past_caches, also_past = numel // LANES, streams(out, numel), streams(also, numel)
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        difference = load(a + at) - load(b + at)
        keep(out + at, difference, past_caches)
        if also:
            keep(also + at, difference, also_past)
    settle()
    one, other, target = floats_at(a, 0, numel), floats_at(b, 0, numel), floats_at(out, 0, numel)
    second = floats_at(also, 0, numel if also else 0)
    for i in range(whole * LANES, numel):
        target[i] = one[i] - other[i]
        if also:
            second[i] = target[i]


def _add_steps(local: Any, params: Any, anchor: Any, given: Any, numel: Any) -> None:
    """`deltas.add_steps_` by address."""
    whole = numel // LANES
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        since = ((load(local + at) + load(params + at)) - load(anchor + at)) - load(given + at)
        store(local + at, since)
    mine, now = floats_at(local, 0, numel), floats_at(params, 0, numel)
    common, before = floats_at(anchor, 0, numel), floats_at(given, 0, numel)
    for i in range(whole * LANES, numel):
        mine[i] = ((mine[i] + now[i]) - common[i]) - before[i]


def _move(anchor: Any, mean: Any, local: Any, params: Any, numel: Any) -> None:
    """`deltas.move_` by address; `local` is 0 where there is none."""
    whole, past_caches = numel // LANES, streams(params, numel)
    for at in range(0, whole * VECTOR_BYTES, VECTOR_BYTES):
        moved = load(anchor + at) + load(mean + at)
        store(anchor + at, moved)
        keep(params + at, moved + load(local + at) if local else moved, past_caches)
    settle()
    common, by, put = floats_at(anchor, 0, numel), floats_at(mean, 0, numel), floats_at(params, 0, numel)
    mine = floats_at(local, 0, numel if local else 0)
    for i in range(whole * LANES, numel):
        common[i] += by[i]
        put[i] = common[i] + mine[i] if local else common[i]


subtract = compile_now(_subtract, ["void(int64, int64, int64, int64, int64)"])
add_steps = compile_now(_add_steps, ["void(int64, int64, int64, int64, int64)"])
move = compile_now(_move, ["void(int64, int64, int64, int64, int64)"])
