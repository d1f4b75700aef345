"""Anchors and outer momenta that are kept in bf16, and are float32 while an answer is applied."""

from __future__ import annotations

import torch
from torch import Tensor

from tacit.contracts import Application, Merge, State, seed_of
from tacit.kernels import deltas
from tacit.kernels.dispatch import pieces
from tacit.kernels.narrow import round_at_random
from tacit.replicas.replica import wide
from tacit.session.buckets import Bucket

PIECE = 1 << 18
"""The number of entries that are float32 at a time: they stay in a cache. On a GPU it is a bucket."""


def anchor_like(bucket: Bucket, bits: int, device: torch.device | str | None = None) -> Tensor:
    """An uninitialised anchor of a bucket, in bf16 if `bits` is 16; those in float64 stay so."""
    kind = wide(bucket.dtype)
    narrow = bits == 16 and kind == torch.float32
    return torch.empty(bucket.numel, dtype=torch.bfloat16 if narrow else kind, device=device or bucket.device)


def is_narrow(anchor: Tensor) -> bool:
    """Whether an anchor is kept in bf16."""
    return anchor.dtype == torch.bfloat16


def round_anchor_(exact: Tensor, anchor: Tensor, *salt: object) -> None:
    """Overwrite the anchor with these values (float32), rounded at random, on all ranks alike.

    Args:
        salt: the session's seed, the step, and what is rounded; the random bits follow from it.
    """
    round_at_random(exact, seed_of(*salt), anchor)


def apply_(
    merge: Merge,
    params: Tensor,
    anchor: Tensor,
    mean: Tensor,
    local_delta: Tensor | None,
    state: State,
    at: Application,
    salt: tuple[object, ...],
) -> None:
    """`Merge.apply_` by a narrow anchor and state, entry by entry; `params` of any shape, the rest flat.

    A replica that keeps what it has not sent keeps what the anchor is rounded by, too, and sends it some day:
    so it is rounded to the nearest number. Other replicas move by it, so that no outer step takes it for
    progress: they round at random, or what is small would be lost.
    """
    flat = params.reshape(-1)
    for here in pieces(anchor, PIECE):
        exact, own = anchor[here].float(), flat[here]
        states = {field: x[here].float() for field, x in state.items()}
        merge.apply_(own, exact, mean[here], None if local_delta is None else local_delta[here], states, at)
        if merge.keeps_unsent:
            anchor[here].copy_(exact)
        else:
            round_anchor_(exact, anchor[here], *salt, here.start)
            own.add_(exact.neg_().add_(anchor[here]))
        for field, x in state.items():
            round_anchor_(states[field], x[here], *salt, field, here.start)
    if flat.data_ptr() != params.data_ptr():
        params.copy_(flat.view(params.shape))


def move_anchor_(anchor: Tensor, mean: Tensor, params: Tensor) -> None:
    """`deltas.move_anchor_` by a narrow anchor: what it is rounded by, to the nearest, is in the delta."""
    flat, by, common = params.reshape(-1), mean.view(-1), anchor.view(-1)
    for here in pieces(common, PIECE):
        exact = common[here].float()
        deltas.move_anchor_(exact, by[here], flat[here])
        common[here].copy_(exact)
        by[here].add_(exact.sub_(common[here]))
