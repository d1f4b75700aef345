"""What runs on a device never waits for it, and writes what the host writes; shown without a device."""

import math
import os
from collections.abc import Callable

import pytest
import torch
from host_sync import HostSync, NoHostSync
from torch import Tensor

from tacit.kernels import blockwise, exponents, int8, levels, orthogonal, philox, select, signs
from tacit.kernels.dispatch import emulated_device
from tacit.kernels.entry_buffers import EntryBuffer, Selection, new_buffer
from tacit.kernels.narrow import round_at_random
from tacit.kernels.payload_layout import (
    block_count,
    blocks_bytes,
    bucket_count,
    code_bytes,
    position_bytes,
    position_format,
)
from tacit.kernels.positions import clear_, pack_positions, scatter_add_, scatter_all_, unpack_positions
from tacit.kernels.thread_scratch import thread_scratch

REALS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton_interpreter

    triton_interpreter.replace_once_a_launch()
SIZES = [1, 7, 512, 5000, *([] if INTERPRETED else [512 * 513 + 77])]
pytestmark = [  # numpy's, under Triton's interpreter
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
]


def numbers(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
    x[::5] = 0.0
    x[1::5] = -0.0
    x[3::7] = 1.5
    return x.to(dtype)


def equal(one: Tensor, other: Tensor) -> bool:
    """To the bit, but for what a NaN looks like."""
    if one.is_floating_point():
        nan = one.isnan()
        if not torch.equal(nan, other.isnan()):
            return False
        one, other = one.masked_fill(nan, 0), other.masked_fill(nan, 0)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def same(call: Callable[..., object], *outs: Tensor) -> None:
    """A call that writes to these tensors does the same on a device as on the host, and waits for nothing."""
    here, there = [each.clone() for each in outs], [each.clone() for each in outs]
    call(*here)
    with emulated_device(), NoHostSync():
        call(*there)
    for one, other in zip(here, there, strict=True):
        assert equal(one, other)


def rubbish(numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.full((numel,), 0b10101010, dtype=dtype)


# ---- entries ------------------------------------------------------------------------------------------


def special(x: Tensor) -> Tensor:
    x[x.numel() // 2 :: 97] = math.nan
    x[x.numel() // 3 :: 89] = -math.inf
    return x


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("special_values", [False, True])
def test_select(special_values: bool, ratio: float, numel: int, dtype: torch.dtype) -> None:
    k = max(1, int(ratio * numel))
    x, residual = numbers(numel, dtype), numbers(numel, dtype, seed=1)
    x = special(x) if special_values else x

    buffer = new_buffer(x, k)

    def plain(positions: Tensor, values: Tensor) -> None:
        written(select.select_largest(x, k, buffer), positions, values)

    def with_residual(positions: Tensor, values: Tensor, new_residual: Tensor) -> None:
        written(select.select_largest(x, k, buffer, residual, new_residual), positions, values)

    outs = torch.zeros(k, dtype=torch.int32), torch.zeros(k, dtype=dtype)
    same(plain, *outs)
    same(with_residual, *outs, torch.zeros(numel, dtype=dtype))


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("per_chunk", "chunk"), [(41, 4096), (1, 100), (64, 64), (5, 1 << 15)])
def test_select_in_chunks(per_chunk: int, chunk: int, numel: int, dtype: torch.dtype) -> None:
    k = numel // chunk * per_chunk + min(per_chunk, numel % chunk)
    x, residual = special(numbers(numel, dtype)), numbers(numel, dtype, seed=1)

    def plain(positions: Tensor, values: Tensor) -> None:
        assert (
            select.select_in_chunks(x, per_chunk, chunk, EntryBuffer(positions, values)).positions.numel()
            == k
        )

    def with_residual(positions: Tensor, values: Tensor, new_residual: Tensor) -> None:
        select.select_in_chunks(x, per_chunk, chunk, EntryBuffer(positions, values), residual, new_residual)

    outs = torch.zeros(k, dtype=torch.int32), torch.zeros(k, dtype=dtype)
    same(plain, *outs)
    same(with_residual, *outs, torch.zeros(numel, dtype=dtype))


def written(found: Selection, positions: Tensor, values: Tensor) -> None:
    assert found.positions.dtype == torch.int32
    positions.copy_(found.positions)
    values.copy_(found.values)


@pytest.mark.parametrize("numel", SIZES)
def test_rounding_to_bf16(numel: int) -> None:
    x = numbers(numel, torch.float32)
    same(lambda out: round_at_random(x, 7, out), torch.zeros(numel, dtype=torch.bfloat16))


CASES = [(1, 1), (9, 9), (257, 3), (1000, 10), (1000, 999), (70_001, 7), (100_003, 30_000), (3_000_000, 300),
         (3_000_000, 5), (3_000_000, 1)]  # fmt: skip


def test_all_formats_are_tried() -> None:
    assert {position_format(*each) for each in CASES} == {0, 1, 2, 4}


@pytest.mark.parametrize(("numel", "k"), CASES)
def test_positions(numel: int, k: int) -> None:
    index = (
        torch.randperm(numel, generator=torch.Generator().manual_seed(k))[:k].sort().values.to(torch.int32)
    )
    packed = rubbish(position_bytes(numel, k))
    same(lambda out: pack_positions(index, numel, k, out), packed)
    pack_positions(index, numel, k, packed)
    same(lambda out: out.copy_(unpack_positions(packed, numel, k)), torch.zeros_like(index))


@pytest.mark.parametrize(("numel", "k"), CASES)
@pytest.mark.parametrize("filler", [0, 255, 0b1011])
def test_damaged_positions_are_harmless(filler: int, numel: int, k: int) -> None:
    packed, out = torch.full((position_bytes(numel, k),), filler, dtype=torch.uint8), torch.zeros(numel)
    values = torch.ones(k)
    with emulated_device(), NoHostSync():
        index = unpack_positions(packed, numel, k)
        scatter_add_(index, values, out)
        if numel < 200_000 or not INTERPRETED:
            scatter_all_([Selection(index, values)] * 2, out, 0.5, fresh=False)
        clear_(index, out)
    assert index.shape == (k,)
    assert index.dtype == torch.int32


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("weight", [1.0, 1 / 3, 1e-40])
def test_scattering_and_clearing(weight: float, dtype: torch.dtype) -> None:
    index = torch.arange(5, 10_000, 7, dtype=torch.int32)
    values, out = numbers(index.numel(), dtype, seed=1), numbers(10_007, dtype)
    same(lambda to: scatter_add_(index, values, to, weight), out)
    same(lambda to: clear_(index, to), out)
    peers = [Selection(index, values), Selection(index[::3].clone(), values[: len(index[::3])])]
    for fresh in (False, True):
        same(lambda to, fresh=fresh: scatter_all_(peers, to, weight, fresh), out)
    same(lambda to: scatter_add_(index[:0], values[:0], to, weight), out)
    same(lambda to: clear_(index[:0], to), out)


def test_what_is_outside_is_left_out() -> None:
    index = torch.tensor([-5, 2, 4, 10, 2**31 - 1], dtype=torch.int32)
    whole, hundred = torch.arange(1.0, 21.0), torch.full((5,), 100.0)
    out = whole[5:15]
    with emulated_device(), NoHostSync():
        scatter_add_(index, hundred, out)
    assert (whole - torch.arange(1.0, 21.0)).nonzero().view(-1).tolist() == [7, 9]
    with emulated_device(), NoHostSync():
        clear_(index, out)
        scatter_add_(index, hundred, out[:0])
        clear_(index, out[:0])
    assert (whole == 0).nonzero().view(-1).tolist() == [7, 9]
    with emulated_device(), NoHostSync():
        clear_(index - 2, out)
    assert (whole == 0).nonzero().view(-1).tolist() == [5, 7, 9, 13]


# ---- quantizing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("two", [False, True])
def test_signs(two: bool, numel: int, dtype: torch.dtype) -> None:
    x, residual = numbers(numel, dtype), numbers(numel, dtype, seed=1)
    count = block_count(numel)
    bits, highs, lows = rubbish(-(-numel // 8)), torch.zeros(count), torch.zeros(count)
    new_residual, one = torch.zeros_like(x), torch.zeros(1)
    if two:
        same(lambda b, h, low: signs.encode_signs(x, b, h, low), bits, highs, lows)
    else:
        same(lambda b, h: signs.encode_signs(x, b, h, None), bits, highs)
        same(lambda b, h, m: signs.encode_sign(x, b, h, m), bits, highs, one)
        same(
            lambda b, h, m, o: signs.encode_sign(x, b, h, m, residual, o),
            bits,
            highs,
            one,
            new_residual,
        )
    for subtract in (False, True):
        same(
            lambda b, h, low, o, subtract=subtract: signs.encode_signs(
                x, b, h, low if two else None, subtract, residual, o, subtract
            ),
            bits, highs, lows, new_residual,
        )  # fmt: skip
    signs.encode_signs(x, bits, highs, lows if two else None, keep_zeros=True)
    payloads = [(bits, highs, lows if two else None)] * 3
    same(lambda out: signs.add_signs_(payloads, 1 / 3, out, fresh=False), residual)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("bits", "bucket", "clip"), [(2, 512, 2.5), (3, 64, -1.0), (4, 512, 0.0), (8, 128, 1.0)]
)
def test_levels(bits: int, bucket: int, clip: float, numel: int, dtype: torch.dtype) -> None:
    x, out = numbers(numel, dtype), numbers(numel, dtype, seed=1)
    codes, units = rubbish(code_bytes(numel, bits)), torch.zeros(bucket_count(numel, bucket))
    same(lambda c, u: levels.quantize(x, bits, bucket, clip, 2**63 + 5, c, u), codes, units)
    levels.quantize(x, bits, bucket, clip, 5, codes, units)
    same(lambda o: levels.add_levels_([(codes, units)] * 2, bits, bucket, 1 / 3, o, fresh=True), out)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("numel", SIZES)
def test_int8_and_exponents(numel: int, dtype: torch.dtype) -> None:
    x, residual = numbers(numel, dtype), numbers(numel, dtype, seed=1)
    codes, units, new_residual = rubbish(numel), torch.zeros(block_count(numel)), torch.zeros_like(x)
    same(lambda c, u: int8.encode_int8(x, c, u), codes, units)
    same(lambda c, u, o: int8.encode_int8(x, c, u, residual, o), codes, units, new_residual)
    int8.encode_int8(x, codes, units)
    same(lambda o: int8.add_int8_([(codes, units)] * 2, 1 / 3, o, fresh=False), residual)
    packed, scales = rubbish(blocks_bytes(numel, 3)), torch.zeros(block_count(numel), dtype=torch.bfloat16)
    same(
        lambda c, u, o: blockwise.encode_blocks(x, 3, c, u, residual, o),
        *(packed, scales, new_residual),
    )
    blockwise.encode_blocks(x, 3, packed, scales)
    same(lambda o: blockwise.add_blocks_([(packed, scales)] * 2, 3, 1 / 3, o, fresh=False), residual)
    bits = rubbish(-(-numel // 8))
    same(lambda e, b: exponents.encode_exponents(x, 7, e, b), codes, bits)
    exponents.encode_exponents(x, 7, codes, bits)
    same(lambda o: exponents.add_exponents_([(codes, bits)] * 2, 1 / 3, o, fresh=False), residual)


# ---- the rest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", REALS[:3])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_orthogonal(rank: int, dtype: torch.dtype) -> None:
    lengths = (1, 3, 64, 700, 129)
    q = numbers(rank * sum(lengths), dtype)
    same(lambda out: orthogonal.scale_(out, lengths, rank), q)
    here, there = q.clone(), q.clone()
    orthogonal.orthogonalize_(here, lengths, rank)
    with emulated_device(), NoHostSync():
        orthogonal.orthogonalize_(there, lengths, rank)
    torch.testing.assert_close(here, there, atol=4 * torch.finfo(dtype).eps, rtol=0)


def test_numbers_between_zero_and_one() -> None:
    with NoHostSync():
        drawn = philox.uniform(2**63 + 3, 100_001, "cpu")
        again, other = philox.uniform(2**63 + 3, 11, "cpu"), philox.uniform(4, 11, "cpu")
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn[:11], again)
    assert not torch.equal(other, again)
    assert 0 <= float(drawn.min()) < 1e-3
    assert 1 > float(drawn.max()) > 1 - 1e-3
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.005)
    assert drawn.unique().numel() == drawn.numel()


def test_scratch_is_on_the_device() -> None:
    with emulated_device(), NoHostSync():
        assert thread_scratch("of a test", 5, torch.int32, torch.device("cpu")).numel() == 5


BAD: dict[str, Callable[[Tensor], object]] = {
    "a value": lambda x: x[0].item(),
    "a truth": lambda x: bool((x > 0).any()),
    "a mask": lambda x: x[x > 0],
    "a mask written to": lambda x: x.__setitem__(x > 0, 1.0),
    "a number at places": lambda x: x.__setitem__(x.long(), 1.0),
    "unique": lambda x: x.unique(),
    "a copy": lambda x: x.cpu(),
    "an array": lambda x: x.numpy(),
    "a list": lambda x: x.tolist(),
    "values of the host": lambda x: x + torch.tensor([1.0]),
    "no device": lambda x: x + torch.ones(1),
    "to the host": lambda x: x.to("cpu"),
    "equality": lambda x: torch.equal(x, x),
    "nonzero": lambda x: torch.where(x > 0),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_waits_is_found(kind: str) -> None:
    x = torch.zeros(3)
    with pytest.raises(HostSync), NoHostSync():
        BAD[kind](x)


def test_what_does_not_wait_may_run() -> None:
    x = torch.arange(3.0)
    with NoHostSync():
        x[1:] = 2
        y = torch.zeros(3, device=x.device).copy_(x)[x.long()]
        x.index_fill_(0, x.long(), 5.0)
    assert y.tolist() == [0.0, 2.0, 2.0]
    assert x.tolist() == [5.0, 2.0, 5.0]
