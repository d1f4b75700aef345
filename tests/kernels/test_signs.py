import math

import pytest
import torch
from torch import Tensor

from tacit.kernels.dispatch import active_backend
from tacit.kernels.payload_layout import BLOCK, block_count
from tacit.kernels.reference import signs as reference
from tacit.kernels.signs import add_signs_, encode_signs

PIECE = BLOCK << 9
SIZES = [1, 7, 8, 9, 63, 511, 512, 513, 519, 1024, 1031, 100_003, PIECE + 513]
REALS = [torch.float32, torch.float64]


def numbers(numel: int, dtype: torch.dtype) -> Tensor:
    """Of both signs, with both zeros."""
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel))
    x[::5] = 0.0
    x[1::5] = -0.0
    return x


def rubbish(x: Tensor) -> Tensor:
    """For the bits of `x`; full of rubbish, as scratch memory is."""
    return torch.full((-(-x.numel() // 8),), 0b10101010, dtype=torch.uint8)


def means(x: Tensor) -> Tensor:
    return torch.empty(block_count(x.numel()))


def payload_of(bits: Tensor, magnitude: float) -> tuple[Tensor, Tensor, None]:
    """Bits that all stand for plus or minus `magnitude`."""
    return bits, torch.tensor([magnitude]), None


@pytest.mark.parametrize("dtype", [*REALS, torch.bfloat16])
@pytest.mark.parametrize("numel", SIZES)
def test_what_is_packed_comes_back_as_signs(numel: int, dtype: torch.dtype) -> None:
    x = numbers(numel, dtype)
    bits, highs, out = rubbish(x), means(x), torch.ones_like(x)
    encode_signs(x, bits, highs, None)
    add_signs_([payload_of(bits, 0.5)], 1.0, out, fresh=False)
    assert torch.equal(out, torch.where(x >= 0, 1.5, 0.5).to(dtype))
    last = numel - (highs.numel() - 1) * BLOCK
    total = float(highs[:-1].double().sum()) * BLOCK + float(highs[-1]) * last
    assert total == pytest.approx(
        float(x.double().abs().sum()), rel=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
def test_the_compiled_kernels_equal_the_reference_bit_for_bit(numel: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    assert active_backend() == "numba"
    x = numbers(numel, dtype)
    fast, slow, here, there = rubbish(x), rubbish(x), means(x), means(x)
    encode_signs(x, fast, here, None)
    reference.encode_signs(x, slow, there, None)
    assert torch.equal(here, there)
    assert torch.equal(fast, slow)
    here, there = x.clone(), x.clone()
    for weight in (0.1, -1 / 3, 1e-40, 1e30):
        add_signs_([payload_of(fast, weight)], 1.0, here, fresh=False)
        reference.add_signs_([payload_of(fast, weight)], 1.0, there, fresh=False)
        assert torch.equal(here, there)


@pytest.mark.parametrize("numel", [5, 512, 1200])
def test_nan_and_infinity_have_bits_too(numel: int) -> None:
    for value, bit in ((math.nan, 0), (-math.inf, 0), (math.inf, 1)):
        x = torch.ones(numel)
        x[numel - 2] = value
        for encode in (encode_signs, reference.encode_signs):
            bits, out = rubbish(x), torch.zeros(numel)
            encode(x, bits, means(x), None)
            add_signs_([payload_of(bits, 1.0)], 1.0, out, fresh=False)
            assert out[numel - 2] == 2 * bit - 1
            assert float(out.sum()) == numel - 2 + 2 * bit


def test_adding_to_infinity_and_nan_leaves_them() -> None:
    x = torch.full((600,), math.inf)
    x[7] = math.nan
    bits = rubbish(x)
    encode_signs(x, bits, means(x), None)
    here, there = x.clone(), x.clone()
    add_signs_([payload_of(bits, -1.0)], 1.0, here, fresh=False)
    reference.add_signs_([payload_of(bits, -1.0)], 1.0, there, fresh=False)
    assert torch.equal(here.nan_to_num(1.0), there.nan_to_num(1.0))
    assert bool(here[7].isnan())
    assert bool((here[:7] == math.inf).all())


def test_a_piece_of_a_longer_tensor_is_left_alone_around() -> None:
    whole = torch.zeros(1000)
    piece = whole[3:900]
    bits = rubbish(piece)
    encode_signs(piece, bits, means(piece), None)
    add_signs_([payload_of(bits, 2.0)], 1.0, piece, fresh=False)
    assert not bool(whole[:3].any())
    assert not bool(whole[900:].any())
    assert bool((whole[3:900] == 2.0).all())


@pytest.mark.parametrize("dtype", [*REALS, torch.bfloat16])
@pytest.mark.parametrize("peers", [1, 2, 4])
@pytest.mark.parametrize("numel", [7, 512, 1031, 100_003])
def test_all_payloads_at_once_are_one_after_the_other(numel: int, peers: int, dtype: torch.dtype) -> None:
    size = -(-numel // 8)
    generator = torch.Generator().manual_seed(numel)
    message = torch.randint(0, 256, (peers, size + 4), dtype=torch.uint8, generator=generator).view(-1)
    magnitudes = [0.1 * (p + 1) for p in range(peers)]
    in_message = [message[p * (size + 4) :][:size] for p in range(peers)]
    expected = torch.zeros(numel, dtype=dtype)
    for bits, magnitude in zip(in_message, magnitudes, strict=True):
        reference.add_signs_([payload_of(bits, magnitude)], 1.0, expected, fresh=False)
    for all_bits in (in_message, [bits.clone() for bits in in_message]):
        out = torch.full_like(expected, math.nan)
        payloads = [payload_of(bits, magnitude) for bits, magnitude in zip(all_bits, magnitudes, strict=True)]
        add_signs_(payloads, 1.0, out, fresh=True)
        assert torch.equal(out, expected)


def test_payloads_in_another_order_than_they_lie_in() -> None:
    message = torch.arange(192, dtype=torch.uint8)
    bits = [message[128:192], message[0:64], message[64:128]]
    out, expected = torch.empty(512), torch.zeros(512)
    payloads = [payload_of(each, magnitude) for each, magnitude in zip(bits, [1.0, 2.0, 4.0], strict=True)]
    add_signs_(payloads, 1.0, out, fresh=True)
    for payload in payloads:
        reference.add_signs_([payload], 1.0, expected, fresh=False)
    assert torch.equal(out, expected)
