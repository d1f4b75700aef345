"""PowerSGD's arithmetic, ours and that of torch's own hook, on the same matrices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from tacit.compressors import PowerSGD
from tacit.contracts import Context, Matrix, Mean

LARGEST = 1024
"""Rows and columns of the matrices, or 512 where there is no room for one of these."""


def cut(numel: int) -> tuple[Matrix, ...]:
    """As many square matrices as fit."""
    side = LARGEST if numel >= LARGEST**2 else 512
    return tuple(Matrix(i * side * side, side, side) for i in range(numel // side**2))


def ours(x: Tensor, rank: int, ctx: Context) -> Callable[[], object]:
    """One exchange with a single peer, so that nothing but arithmetic is left."""
    compressor = PowerSGD(rank=rank, matrices=cut(x.numel()))
    state = compressor.init(x)

    def exchange() -> None:
        talk = compressor.exchange(x, state, ctx)
        wish = next(talk)
        try:
            while True:
                assert isinstance(wish, Mean)
                wish = talk.send(wish.payload)
        except StopIteration:
            pass

    return exchange


def torchs(x: Tensor, rank: int) -> Callable[[], object]:
    """The hook's: two products and the orthogonalization, then the product that is the answer; batched."""
    matrices = cut(x.numel())
    count, side = len(matrices), matrices[0].rows
    whole = x[: count * side * side].view(count, side, side)
    p, q = torch.empty(count, side, rank), torch.randn(count, side, rank)
    before, out = q.clone(), torch.empty_like(whole)

    def step() -> None:
        torch.bmm(whole, before, out=p)
        _orthogonalize(p)
        torch.bmm(whole.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=out)

    return step
