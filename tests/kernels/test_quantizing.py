"""Kernels that quantize: compiled and in plain torch the same bits, for any shape and values."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tacit.kernels import blockwise, exponents, fp8, int8, levels, signs, two_magnitudes
from tacit.kernels.dispatch import active_backend
from tacit.kernels.payload_layout import (
    block_count,
    blocks_bytes,
    bucket_count,
    code_bytes,
    pack_codes,
    pack_trits,
    unpack_codes,
    unpack_trits,
)
from tacit.kernels.philox import philox
from tacit.kernels.reference import blockwise as blockwise_reference
from tacit.kernels.reference import exponents as exponents_reference
from tacit.kernels.reference import fp8 as fp8_reference
from tacit.kernels.reference import int8 as int8_reference
from tacit.kernels.reference import levels as levels_reference
from tacit.kernels.reference import signs as signs_reference
from tacit.kernels.reference import two_magnitudes as two_magnitudes_reference

HUGE = 3.4e38
LARGE = 1 << 19
"""Entries from which on results are written past the caches."""
SIZES = st.one_of(st.integers(0, 70), st.integers(500, 1100), st.just(512 * 513 + 77))
KINDS = ["normal", "huge", "denormal", "positive", "zero", "mixed"]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    pytest.importorskip("numba")
    assert active_backend() == "numba"


def numbers(numel: int, kind: str, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
    x[::5] = 0.0
    x[1::5] = -0.0
    if kind == "huge":
        x = (1e38 * x).clamp(-HUGE, HUGE)
    if kind == "denormal":
        x *= 1e-40
    if kind == "positive":
        x.abs_()
    if kind == "zero":
        x.zero_()
    if kind == "mixed":
        x[::7] *= 1e30
        x[512:1024] *= 1e-39
    return x


def rubbish(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.full((numel,), 0b10101010, dtype=dtype)


def same(
    fast: Callable[..., None], slow: Callable[..., None], outs: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """Both write equal tensors; what the fast one wrote."""
    here, there = outs(), outs()
    fast(*here)
    slow(*there)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b)
        assert not a.is_floating_point() or bool(a.isfinite().all())
    return here


@settings(max_examples=20, deadline=None)
@given(SIZES, st.integers(2, 8), st.sampled_from([64, 128, 512]), st.sampled_from([0.0, -1.0, 1.0, 2.5]))
@pytest.mark.parametrize("kind", KINDS)
def test_levels(kind: str, numel: int, bits: int, bucket: int, clip: float) -> None:
    x, seed = numbers(numel, kind), 2**61 + numel
    codes, units = same(
        lambda c, u: levels.quantize(x, bits, bucket, clip, seed, c, u),
        lambda c, u: levels_reference.quantize(x, bits, bucket, clip, seed, c, u),
        lambda: [rubbish(code_bytes(numel, bits)), rubbish(bucket_count(numel, bucket), torch.float32)],
    )
    payloads = [(codes, units)] * 3
    (mean,) = same(
        lambda out: levels.add_levels_(payloads, bits, bucket, 1 / 3, out, fresh=True),
        lambda out: levels_reference.add_levels_(payloads, bits, bucket, 1 / 3, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )
    if clip == 0.0 and numel and kind != "denormal":
        step = x.abs().max() / ((1 << (bits - 1)) - 1)
        assert float((mean - x).abs().max()) <= 1.001 * float(step) + 1e-37


@settings(max_examples=15, deadline=None)
@given(SIZES, st.sampled_from([64, 512]))
@pytest.mark.parametrize("kind", KINDS)
def test_two_magnitudes(kind: str, numel: int, bucket: int) -> None:
    x = numbers(numel, kind)
    codes, units = same(
        lambda c, u: two_magnitudes.encode_magnitudes(x, bucket, c, u),
        lambda c, u: two_magnitudes_reference.encode_magnitudes(x, bucket, c, u),
        lambda: [rubbish(code_bytes(numel, 2)), rubbish(2 * bucket_count(numel, bucket), torch.bfloat16)],
    )
    (decoded,) = same(
        lambda out: two_magnitudes.add_magnitudes_([(codes, units)], bucket, 1.0, out, fresh=True),
        lambda out: two_magnitudes_reference.add_magnitudes_([(codes, units)], bucket, 1.0, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )
    for start in range(0, min(numel, 8 * bucket), bucket):
        scale = max(float(x[start : start + bucket].abs().max()), 2.0**-100)
        part, found = (each[start : start + bucket].double() / scale for each in (x, decoded))
        assert len(found.abs().unique()) <= 2
        assert not (found * part < 0).any()
        # The mean of each side: together as much as there was, and nearer to it than one magnitude is.
        assert abs(float(found.abs().mean() - part.abs().mean())) <= 2**-8
        left = (found.abs() - part.abs()).square().mean().sqrt()
        assert float(left) <= float((part.abs() - part.abs().mean()).square().mean().sqrt()) + 2**-8


@settings(max_examples=15, deadline=None)
@given(SIZES, st.booleans(), st.booleans(), st.booleans())
@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str, numel: int, two: bool, subtract: bool, keep: bool) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, kind, seed=1)
    x[::7] = residual[::7] = 0
    count = block_count(numel)

    def buffers() -> list[Tensor]:
        return [rubbish(-(-numel // 8)), *(rubbish(count, torch.float32) for _ in range(2))]

    def lows(tensor: Tensor) -> Tensor | None:
        return tensor if two else None

    bits, high, low = same(
        lambda b, h, w: signs.encode_signs(x, b, h, lows(w), keep),
        lambda b, h, w: signs_reference.encode_signs(x, b, h, lows(w), keep),
        buffers,
    )
    payload = bits, high, lows(low)
    same(
        lambda out: signs.add_signs_([payload] * 3, 1 / 3, out, fresh=True),
        lambda out: signs_reference.add_signs_([payload] * 3, 1 / 3, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )

    def slowly(b: Tensor, h: Tensor, w: Tensor, new_residual: Tensor) -> None:
        torch.add(x, residual, out=new_residual)
        signs_reference.encode_signs(new_residual, b, h, lows(w), keep)
        if subtract:
            signs_reference.add_signs_([(b, h, lows(w))], -1.0, new_residual, fresh=False)

    if kind != "huge":  # a sum of two could overflow
        same(
            lambda b, h, w, new_residual: signs.encode_signs(
                x, b, h, lows(w), keep, residual, new_residual, subtract
            ),
            slowly,
            lambda: [*buffers(), torch.full((numel,), math.nan)],
        )


@settings(max_examples=15, deadline=None)
@given(SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_magnitude_for_all(kind: str, numel: int) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, kind, seed=1)

    def buffers() -> list[Tensor]:
        return [rubbish(-(-numel // 8)), rubbish(block_count(numel), torch.float32), torch.full((1,), 7.0)]

    def slowly(b: Tensor, m: Tensor, magnitude: Tensor) -> None:
        signs_reference.encode_signs(x, b, m, None)
        signs_reference.overall_mean(m, numel, magnitude)

    *_, magnitude = same(lambda *outs: signs.encode_sign(x, *outs), slowly, buffers)
    if numel and kind not in ("denormal", "huge"):
        assert magnitude.item() == pytest.approx(float(x.double().abs().mean()), rel=1e-5)

    def slowly_with_residual(b: Tensor, m: Tensor, magnitude: Tensor, new_residual: Tensor) -> None:
        torch.add(x, residual, out=new_residual)
        signs_reference.encode_signs(new_residual, b, m, None)
        signs_reference.overall_mean(m, numel, magnitude)
        signs_reference.add_signs_([(b, magnitude, None)], -1.0, new_residual, fresh=False)

    if kind != "huge":
        same(
            lambda b, m, magnitude, new_residual: signs.encode_sign(
                x, b, m, magnitude, residual, new_residual
            ),
            slowly_with_residual,
            lambda: [*buffers(), torch.full((numel,), math.nan)],
        )


def test_two_means_are_those_of_each_side() -> None:
    x = torch.tensor([3.0, -1.0, 0.0, -5.0, 6.0])
    bits, high, low = rubbish(1), torch.empty(1), torch.empty(1)
    signs.encode_signs(x, bits, high, low)
    assert (bits.item(), high.item(), low.item()) == (0b10101, 3.0, -3.0)


@settings(max_examples=15, deadline=None)
@given(SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_int8(kind: str, numel: int) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, kind, seed=1)

    def buffers() -> list[Tensor]:
        return [rubbish(numel), rubbish(block_count(numel), torch.float32)]

    payload = same(
        lambda c, u: int8.encode_int8(x, c, u), lambda c, u: int8_reference.encode_int8(x, c, u), buffers
    )
    (mean,) = same(
        lambda out: int8.add_int8_([payload] * 3, 1 / 3, out, fresh=True),
        lambda out: int8_reference.add_int8_([payload] * 3, 1 / 3, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )
    if numel and kind != "denormal":
        assert float((mean - x).abs().max()) <= float(x.abs().max()) / 253 + 1e-37

    def slowly(c: Tensor, u: Tensor, new_residual: Tensor) -> None:
        torch.add(x, residual, out=new_residual)
        int8_reference.encode_int8(new_residual, c, u)
        int8_reference.add_int8_([(c, u)], -1.0, new_residual, fresh=False)

    if kind != "huge":
        same(
            lambda c, u, new_residual: int8.encode_int8(x, c, u, residual, new_residual),
            slowly,
            lambda: [*buffers(), torch.full((numel,), math.nan)],
        )


@settings(max_examples=20, deadline=None)
@given(SIZES, st.integers(2, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_blocks(kind: str, numel: int, bits: int) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, kind, seed=1)

    def buffers() -> list[Tensor]:
        return [rubbish(blocks_bytes(numel, bits)), rubbish(block_count(numel), torch.bfloat16)]

    payload = same(
        lambda c, u: blockwise.encode_blocks(x, bits, c, u),
        lambda c, u: blockwise_reference.encode_blocks(x, bits, c, u),
        buffers,
    )
    (mean,) = same(
        lambda out: blockwise.add_blocks_([payload] * 3, bits, 1 / 3, out, fresh=True),
        lambda out: blockwise_reference.add_blocks_([payload] * 3, bits, 1 / 3, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )
    top = (1 << (bits - 1)) - 1
    if kind != "denormal":  # half a unit; what lies beyond the largest of bf16 is cut off
        step = payload[1].float().repeat_interleave(512)[:numel]
        assert bool(((mean - x).abs() <= 0.501 * step + 0.004 * x.abs() + 1e-37).all())
        for block, unit in zip(x.split(512) if numel else (), payload[1].tolist(), strict=True):
            assert unit * top >= min(float(block.abs().max()), 3.38e38) or unit == 0, "rounded up"

    def slowly(c: Tensor, u: Tensor, new_residual: Tensor) -> None:
        torch.add(x, residual, out=new_residual)
        blockwise_reference.encode_blocks(new_residual, bits, c, u)
        blockwise_reference.add_blocks_([(c, u)], bits, -1.0, new_residual, fresh=False)

    if kind != "huge":
        same(
            lambda c, u, after: blockwise.encode_blocks(x, bits, c, u, residual, after),
            slowly,
            lambda: [*buffers(), torch.full((numel,), math.nan)],
        )


@settings(max_examples=15, deadline=None)
@given(SIZES, st.sampled_from([1.0, 0.37, 400.0, 0.0]))
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", KINDS)
def test_fp8(kind: str, dtype: torch.dtype, numel: int, inverse: float) -> None:
    x = numbers(numel, kind)
    factor = torch.tensor([inverse])
    if kind == "mixed":
        x[3::11] = torch.tensor([math.inf, math.nan, -math.inf]).repeat(numel)[: len(x[3::11])]
    codes, expected = rubbish(numel), rubbish(numel)
    fp8.encode_fp8(x, factor, dtype, codes)
    fp8_reference.encode_fp8(x, factor, dtype, expected)
    assert torch.equal(as_numbers(codes, dtype), as_numbers(expected, dtype))
    payloads = [
        (every.repeat(numel // 256 + 1)[:numel].contiguous(), torch.tensor([scale]))
        for every, scale in ((EVERY_BYTE, 0.3), (EVERY_BYTE.flip(0), 7.0))
    ]
    for fresh in (True, False):
        fast, slow = x.clone(), x.clone()
        fp8.add_fp8_(payloads, dtype, 0.5, fast, fresh)
        fp8_reference.add_fp8_(payloads, dtype, 0.5, slow, fresh)
        torch.testing.assert_close(fast, slow, rtol=0, atol=0, equal_nan=True)


EVERY_BYTE = torch.arange(256).to(torch.uint8)


def as_numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Of fp8; every NaN as 1e9."""
    return codes.view(dtype).float().nan_to_num(1e9, math.inf, -math.inf)


@settings(max_examples=15, deadline=None)
@given(SIZES, st.integers(0, 2**62))
@pytest.mark.parametrize("kind", KINDS)
def test_exponents(kind: str, numel: int, seed: int) -> None:
    x = numbers(numel, kind)
    payload = same(
        lambda e, b: exponents.encode_exponents(x, seed, e, b),
        lambda e, b: exponents_reference.encode_exponents(x, seed, e, b),
        lambda: [rubbish(numel), rubbish(-(-numel // 8))],
    )
    (value,) = same(
        lambda out: exponents.add_exponents_([payload], 1.0, out, fresh=True),
        lambda out: exponents_reference.add_exponents_([payload], 1.0, out, fresh=True),
        lambda: [torch.full((numel,), math.nan)],
    )
    near = x.abs() >= 2.0**-126
    assert bool((value / x)[near].ge(0.5).all())
    assert bool((value / x)[near].le(2.0).all())
    assert bool((value[x == 0] == 0).all())


@pytest.mark.parametrize(
    ("test", "rest"),
    [
        (test_levels, (4, 512, 0.0)),
        (test_levels, (2, 512, 0.0)),
        (test_levels, (8, 512, 2.5)),
        (test_signs, (False, True, True)),
        (test_signs, (False, False, True)),
        (test_signs, (True, True, True)),
        (test_signs, (True, False, False)),
        (test_one_magnitude_for_all, ()),
        (test_int8, ()),
        (test_blocks, (2,)),
        (test_blocks, (3,)),
    ],
)
def test_what_is_written_past_the_caches(test: Any, rest: tuple[Any, ...]) -> None:
    test.hypothesis.inner_test("normal", LARGE + 589, *rest)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_past_the_caches(dtype: torch.dtype) -> None:
    test: Any = test_fp8
    test.hypothesis.inner_test("mixed", dtype, LARGE + 77, 0.37)


@pytest.mark.parametrize("first", [1, 16])
def test_large_tensors_that_begin_anywhere(first: int) -> None:
    """What is written past the caches has to be aligned."""
    x, residual = (numbers(LARGE + first, "normal", seed)[first:] for seed in (0, 1))
    codes, units = rubbish(len(x)), torch.empty(block_count(len(x)))

    def slowly(new_residual: Tensor) -> None:
        torch.add(x, residual, out=new_residual)
        int8_reference.encode_int8(new_residual, codes, units)
        int8_reference.add_int8_([(codes, units)], -1.0, new_residual, fresh=False)

    same(
        lambda new_residual: int8.encode_int8(x, codes, units, residual, new_residual),
        slowly,
        lambda: [torch.full((LARGE + first,), math.nan)[first:]],
    )
    same(
        lambda out: int8.add_int8_([(codes, units)], 1.0, out, fresh=True),
        lambda out: int8_reference.add_int8_([(codes, units)], 1.0, out, fresh=True),
        lambda: [torch.full((LARGE + first,), math.nan)[first:]],
    )


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(1, 200), st.integers(1, 3))
def test_codes_that_are_packed_are_unpacked(bits: int, size: int, rows: int) -> None:
    codes = torch.randint(1 << bits, (rows, size))
    packed = pack_codes(codes, bits)
    assert packed.numel() == rows * code_bytes(size, bits)
    assert torch.equal(unpack_codes(packed, bits, size), codes)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 600), st.integers(1, 3))
def test_trits_that_are_packed_are_unpacked(size: int, rows: int) -> None:
    codes = torch.randint(3, (rows, size))
    packed = pack_trits(codes)
    assert packed.numel() == rows * -(-size // 5)
    assert torch.equal(unpack_trits(packed, size), codes)


def test_philox_gives_the_numbers_of_its_authors() -> None:
    """The known answers of Random123 for a counter and a key of zeros."""
    words = [int(word) for word in philox(0, torch.zeros((), dtype=torch.int64))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_take_the_way_of_plain_torch(dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    payload = rubbish(1000), torch.empty(2)
    int8.encode_int8(x, *payload)
    out = torch.empty_like(x)
    int8.add_int8_([payload], 1.0, out, fresh=True)
    torch.testing.assert_close(out, x, atol=0.03, rtol=0.01)
