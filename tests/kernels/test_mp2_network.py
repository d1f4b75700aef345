"""MP²'s network by numba: the bits of plain torch, of changes side by side and of those received by turns."""

import pytest
import torch
from torch import Tensor, nn

from tacit.kernels import mp2_network
from tacit.kernels.dispatch import active_backend
from tacit.kernels.reference import mp2_network as reference
from tacit.prediction.networks.mp2 import MP2, MP2Network
from tacit.prediction.predictor import ROUNDS, Predictor, Received

pytestmark = pytest.mark.skipif(active_backend() != "numba", reason="numba is not installed")
LIMIT = 5.0
SIZES = (1, 15, 16, 17, 5003)


def packed(width: int) -> Tensor:
    torch.manual_seed(width)
    named = {name: nn.init.normal_(p.detach()) for name, p in MP2Network(width).named_parameters()}
    return mp2_network.packed_weights(named)


def changes(numel: int, seed: int) -> Tensor:
    """Of many magnitudes, with zeros; in a long one what overflows, and what is no number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, numel, generator=generator)
    x *= 10.0 ** torch.randint(-8, 3, x.shape, generator=generator)
    x[:, ::7] = x[0, ::5] = 0
    if numel > 20:
        x[0, 3], x[1, 4], x[1, 6], x[0, 8] = float("nan"), float("inf"), -float("inf"), 1e-42
        x[:, 9] = 3e38
    return x


def received(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Received:
    generator = torch.Generator().manual_seed(seed)
    age, gap = (torch.randint(-3, 30, (numel,), generator=generator).short() for _ in range(2))
    age[::11] = -(1 << 15)  # never received
    before, last = changes(numel, seed).to(dtype)
    ratios = 2.0 ** torch.randint(-7, 8, (ROUNDS + 1,), generator=generator)
    return Received(before, last, age, gap, ratios)


def equal(a: Tensor, b: Tensor) -> None:
    bits = {4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    assert torch.equal(a.isnan(), b.isnan())
    known = ~a.isnan()
    assert torch.equal(a[known].view(bits), b[known].view(bits))


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("width", range(1, 9))
def test_of_changes_side_by_side(width: int, numel: int) -> None:
    weights, x = packed(width), changes(numel, width)
    varying = torch.randint(1, 9, (2, numel)).float(), torch.randn(2, numel)
    shared = torch.tensor([[2.0], [1.0]]), torch.zeros(2, 1)
    for ages, sizes in (varying, shared, (varying[0], shared[1])):
        fast, slow = torch.full((numel,), 7.0), torch.empty(numel)
        mp2_network.predict_changes(x, ages, sizes, weights, width, LIMIT, fast)
        reference.predict_changes(x, ages, sizes, weights, width, LIMIT, slow)
        equal(fast, slow)
        assert numel < 16 or bool(slow.nan_to_num().any())


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("width", [1, 4, 6, 8])
def test_of_changes_received_by_turns(width: int, numel: int) -> None:
    weights, history = packed(width), received(numel, width)
    fast, slow, seen = torch.full((numel,), 7.0), torch.empty(numel), history.seen(slice(None))
    sizes = history.ratios.log2()
    assert mp2_network.predict_received(*history[:4], sizes, weights, width, LIMIT, 0.7, fast)
    reference.predict_changes(seen.changes, seen.ages, seen.swings.log2(), weights, width, LIMIT, slow)
    equal(fast, slow * 0.7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_predicted_in_fp32(dtype: torch.dtype) -> None:
    weights, x = packed(4), changes(100, 1).clamp(-1e4, 1e4).to(dtype)
    ages, sizes = torch.tensor([[2.0], [1.0]]), torch.zeros(2, 1)
    fast, slow = (torch.empty(100, dtype=dtype) for _ in range(2))
    mp2_network.predict_changes(x, ages, sizes, weights, 4, LIMIT, fast)
    reference.predict_changes(x, ages, sizes, weights, 4, LIMIT, slow)
    equal(fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_in_one_pass_it_is_what_it_is_from_the_history(dtype: torch.dtype) -> None:
    history, network = received(20_000, 3, dtype), MP2()
    for kind in (*network.kinds(), "of no kind"):
        once, by_pieces = (torch.empty(20_000, dtype=dtype) for _ in range(2))
        network.write_received(history, kind, once, 0.5)
        Predictor.write_received(network, history, kind, by_pieces, 0.5)
        equal(once, by_pieces)
        assert bool(once.nan_to_num().any()) == (kind in network.kinds())
