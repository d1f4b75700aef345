"""What rounds of parameters add and subtract: compiled and by torch the same bits."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tacit.kernels import deltas, dispatch

LARGE = 1 << 19
"""Entries from which on results are written past the caches."""
SIZES = [0, 1, 63, 64, 200, LARGE - 1, LARGE + 77]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    pytest.importorskip("numba")
    assert dispatch.active_backend() == "numba"
    deltas.prepare()


def numbers(numel: int, seed: int, first: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel + first, generator=generator) ** 3)[first:]


def same(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., None], made: Callable[[], list[Tensor]]
) -> None:
    """The call leaves the same in all tensors, with compiled kernels and without."""
    fast, slow = made(), made()
    call(*fast)
    with monkeypatch.context() as patch:
        patch.setattr(deltas, "numba_is_loaded", lambda: False)
        call(*slow)
    for one, other in zip(fast, slow, strict=True):
        assert torch.equal(one, other)


def stay(anchor: Tensor, local: Tensor, params: Tensor) -> None:
    """The parameters of an anchor that does not move."""
    deltas.move_(anchor, None, params, local)


@pytest.mark.parametrize("first", [0, 1, 16])
@pytest.mark.parametrize("numel", SIZES)
def test_the_same_bits(numel: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(count: int) -> Callable[[], list[Tensor]]:
        return lambda: [numbers(numel, seed, first) for seed in range(count)]

    same(monkeypatch, deltas.subtract, made(3))
    same(monkeypatch, deltas.subtract, made(4))
    same(monkeypatch, deltas.add_steps_, made(4))
    same(monkeypatch, deltas.move_, made(3))
    same(monkeypatch, deltas.move_, made(4))
    same(monkeypatch, stay, made(3))
    same(monkeypatch, deltas.move_anchor_, made(3))


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels-last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(5, 4, 6, 5), (3, 96, 3, 3), (600, 128, 3, 3), (7, 3, 1, 1), (9, 1, 5, 5)])
def test_other_orders_of_memory(
    shape: tuple[int, ...], order: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the parameters of a model in channels-last have them, and nothing else."""

    def made(count: int, params: int) -> Callable[[], list[Tensor]]:
        def make() -> list[Tensor]:
            tensors = [numbers(math.prod(shape), seed).view(shape).to(dtype) for seed in range(count)]
            tensors[params] = ORDERS[order](tensors[params])
            return tensors

        return make

    same(monkeypatch, deltas.subtract, made(3, 0))
    same(monkeypatch, deltas.subtract, made(4, 0))
    same(monkeypatch, deltas.add_steps_, made(4, 1))
    same(monkeypatch, deltas.move_, made(3, 2))
    same(monkeypatch, deltas.move_, made(4, 2))
    same(monkeypatch, stay, made(3, 2))
    same(monkeypatch, deltas.move_anchor_, made(3, 2))


def test_autograd_sees_that_parameters_were_written() -> None:
    weight = torch.nn.Parameter(numbers(100, 0))
    loss = (weight * weight).sum()
    deltas.move_(numbers(100, 1), numbers(100, 2), weight.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]
