"""Laws for merges."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tacit.contracts import Application, Merge, State
from tacit.testing.ranks import heavy_tailed, naming


def check_merge(merge: Merge, *, dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64)) -> None:
    """Check a merge against its laws, for answers that come at once and for late ones.

    The anchor and the state have the same bits on all ranks, whatever the parameters of each rank are; all is
    finite; where `merge.meets` and the answer comes at once, every replica is at the anchor. What the merge
    declares holds: that it does not read the parameters, that it works entry by entry.

    Raises:
        AssertionError: a law does not hold.
    """
    for dtype in dtypes:
        for lag in (0, 3):
            with naming(merge, f"lag={lag}", dtype):
                _check_merge(merge, dtype, lag)


def _check_merge(merge: Merge, dtype: torch.dtype, lag: int, peers: int = 3, numel: int = 50) -> None:
    anchors = [heavy_tailed(numel, dtype, 0) for _ in range(peers)]
    states = [merge.init(anchor) for anchor in anchors]
    where = Application(peers=peers, lag=lag, lr=0.1, parties=peers)
    for seed in range(3):
        deltas = [heavy_tailed(numel, dtype, 10 * seed + rank) for rank in range(peers)]
        mean = torch.stack(deltas).mean(0)
        for rank in range(peers):
            params = anchors[rank] + deltas[rank] + lag * heavy_tailed(numel, dtype, 100 + rank)
            answers = ("always", "late") if lag else ("always",)
            own = deltas[rank].clone() if merge.needs_local_delta in answers else None
            given = anchors[rank].clone(), mean.clone(), own, states[rank]
            blind = params if merge.reads_params in answers else torch.full_like(params, torch.nan)
            found = _in_pieces(merge, blind, given, where)
            merge.apply_(params, anchors[rank], mean.clone(), own, states[rank], where)
            assert torch.equal(found, params), "it reads the parameters, or is not entrywise, and says it is"
            assert bool(params.isfinite().all()), "the parameters are not finite"
            if merge.meets and not lag:
                assert torch.equal(params, anchors[rank]), "merge.meets, and a replica is not at the anchor"
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors), "the anchors of ranks differ"
        for name in states[0]:
            assert all(torch.equal(state[name], states[0][name]) for state in states), f"{name} differs"
        for anchor in anchors:
            merge.consolidate_(anchor, mean.clone())
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors), "consolidate_ makes ranks differ"


def _in_pieces(
    merge: Merge,
    params: Tensor,
    given: tuple[Tensor, Tensor, Tensor | None, State],
    where: Application,
) -> Tensor:
    """The parameters after `apply_` on spans and on matrices of a bucket, if the merge allows that."""
    anchor, mean, own, state = given
    params, own = params.clone(), None if own is None else own.clone()
    state = {name: each.clone() for name, each in state.items()}
    half = len(params) // 2
    for here in (slice(0, half), slice(half, None)) if merge.entrywise else (slice(None),):
        shape = (5, -1) if merge.entrywise else (-1,)
        merge.apply_(
            params[here].view(shape),
            anchor[here].view(shape),
            mean[here].view(shape),
            None if own is None else own[here].view(shape),
            {name: each[here].view(shape) for name, each in state.items()},
            where,
        )
    return params
