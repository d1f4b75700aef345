"""The Triton kernels against the references on the CPU, bit for bit; run by `test_triton`.

On a GPU, or in Triton's interpreter (TRITON_INTERPRET=1 and TACIT_KERNELS=triton), where sizes are small.
The references run on the CPU: on CUDA, torch divides by a scalar by multiplying by its inverse.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tacit.kernels import (
    blockwise,
    byte_planes,
    entropy,
    exponents,
    fp8,
    int8,
    levels,
    mp2_network,
    narrow,
    orthogonal,
    products,
    select,
    signs,
)
from tacit.kernels.dispatch import active_backend, emulated_device, find_backend
from tacit.kernels.entry_buffers import MARGIN, EntryBuffer, Selection
from tacit.kernels.payload_layout import (
    BLOCK,
    block_count,
    blocks_bytes,
    bucket_count,
    code_bytes,
    position_bytes,
)
from tacit.kernels.positions import (
    clear_,
    pack_positions,
    scatter_add_,
    scatter_all_,
    unpack_all,
    unpack_positions,
)
from tacit.kernels.reference import blockwise as blockwise_reference
from tacit.kernels.reference import exponents as exponents_reference
from tacit.kernels.reference import fp8 as fp8_reference
from tacit.kernels.reference import int8 as int8_reference
from tacit.kernels.reference import levels as levels_reference
from tacit.kernels.reference import mp2_network as mp2_network_reference
from tacit.kernels.reference import narrow as narrow_reference
from tacit.kernels.reference import orthogonal as orthogonal_reference
from tacit.kernels.reference import positions as positions_reference
from tacit.kernels.reference import select as select_reference
from tacit.kernels.reference import signs as signs_reference
from tacit.prediction.networks.mp2 import MP2Network, normalised, run
from tacit.prediction.predictor import Seen

ON = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
if ON == "cpu":
    import triton_interpreter

    triton_interpreter.replace_once_a_launch()
LARGE = [] if ON == "cpu" else [5000, 512 * 8192 + 77]
"""Not in the interpreter, which takes a second for each."""
SIZES = [0, 7, 1100, *([512] if LARGE else []), *LARGE]
KINDS = ["huge", "denormal", "zero", "mixed"]
WEIGHT = 1 / 3
# numpy's, under the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")


@pytest.fixture(autouse=True)
def _triton() -> Iterator[None]:
    assert active_backend(ON) == "triton"
    with emulated_device() if ON == "cpu" else nullcontext():
        yield
    assert "plain torch" not in find_backend(ON).description


HALVES = [torch.bfloat16, torch.float16]
TYPES = pytest.mark.parametrize("dtype", [torch.float32, *HALVES])


def by_type(*cases: tuple[float, ...]) -> list[tuple[object, ...]]:
    """Types and cases: in the interpreter fp32 goes with all, and each other type with every second."""
    return [
        (dtype, *case)
        for i, dtype in enumerate((torch.float32, *HALVES))
        for j, case in enumerate(cases)
        if LARGE or i == 0 or (i + j) % 2
    ]


NUMBERS = [(torch.float32, kind) for kind in KINDS]
NUMBERS += [(half, kind) for half in HALVES for kind in (KINDS[::3] if LARGE else KINDS[3:])]
EACH = pytest.mark.parametrize(("dtype", "kind"), NUMBERS)
WAYS = [(two, keep) for two in (False, True) for keep in (False, True)]
"""Of signs: whether a block has two magnitudes, and what is kept of zeros."""


def numbers(numel: int, kind: str = "normal", seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) ** 3
    x[::5] = 0.0
    x[1::5] = -0.0
    if kind == "huge":
        x = (1e38 * x).clamp(-3.4e38, 3.4e38)
    if kind == "denormal":
        x *= 1e-40
    if kind == "zero":
        x.zero_()
    if kind == "mixed":
        x[::7] *= 1e30
        x[512:1024] *= 1e-39
    most = torch.finfo(dtype).max
    return x.clamp_(-most, most).to(dtype)


def rubbish(*shapes: tuple[int, torch.dtype]) -> list[Tensor]:
    return [torch.full((numel,), 0b10101010, dtype=dtype) for numel, dtype in shapes]


def there(tensors: list[Tensor]) -> list[Tensor]:
    """The same on the device, each a tensor of its own."""
    return [each.clone().to(ON) for each in tensors]


def same(fast: list[Tensor], slow: list[Tensor]) -> None:
    """Bit for bit; but a NaN is one, whatever its bits."""
    for a, b in zip((each.cpu() for each in fast), slow, strict=True):
        if a.is_floating_point():
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def old_residual(numel: int, kind: str, dtype: torch.dtype) -> Tensor:
    return (0.5 * numbers(numel, "zero" if kind == "huge" else kind, seed=1)).to(dtype)


def rows(payload: list[Tensor], peers: int) -> list[list[Tensor]]:
    """The payload of each of several peers, as rows of messages; on the device."""
    columns = [each.repeat(peers, 1).to(ON) for each in payload]
    return [list(payload) for payload in zip(*columns, strict=True)]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(
    ("dtype", "kind", "two", "keep"),
    # In the interpreter every way of fp32 that is mixed, and two of the others, in turns.
    [(*each, *way) for i, each in enumerate(NUMBERS) for j, way in enumerate(WAYS)
     if LARGE or each == (torch.float32, "mixed") or (i + j) % 2],
)  # fmt: skip
def test_signs(dtype: torch.dtype, kind: str, two: bool, keep: bool, numel: int) -> None:
    x, residual = numbers(numel, kind, 0, dtype), old_residual(numel, kind, dtype)
    x[::7] = residual[::7] = 0
    count = block_count(numel)
    bits, highs, *lows = rubbish((-(-numel // 8), torch.uint8), *[(count, torch.float32)] * (2 if two else 1))
    slow = [bits, highs, *lows]
    fast = there(slow)
    signs.encode_signs(x.to(ON), fast[0], fast[1], fast[2] if two else None, keep)
    signs_reference.encode_signs(x, bits, highs, lows[0] if two else None, keep)
    same(fast, slow)
    for subtract in (False, True):
        new_residual = torch.empty(numel, dtype=dtype)
        fast_residual = new_residual.clone().to(ON)
        low = fast[2] if two else None
        signs.encode_signs(x.to(ON), fast[0], fast[1], low, keep, residual.to(ON), fast_residual, subtract)
        torch.add(x, residual, out=new_residual)
        signs_reference.encode_signs(new_residual, bits, highs, lows[0] if two else None, keep)
        if subtract:
            signs_reference.add_signs_(
                [(bits, highs, lows[0] if two else None)], -1.0, new_residual, fresh=False
            )
        same([*fast, fast_residual], [*slow, new_residual])
    for fresh in (False, True):
        out = numbers(numel, seed=2, dtype=dtype)
        fast_out = out.clone().to(ON)
        sent = [(p[0], p[1], p[2] if two else None) for p in rows(slow, 3)]
        signs.add_signs_(sent, WEIGHT, fast_out, fresh)
        signs_reference.add_signs_([(bits, highs, lows[0] if two else None)] * 3, WEIGHT, out, fresh)
        same([fast_out], [out])


@pytest.mark.parametrize("numel", [*SIZES, 512 * 1025 if LARGE else 1537])
@EACH
def test_one_magnitude_of_signs(dtype: torch.dtype, kind: str, numel: int) -> None:
    x, residual = numbers(numel, kind, 0, dtype), old_residual(numel, kind, dtype)
    parts = (-(-numel // 8), torch.uint8), (block_count(numel), torch.float32), (1, torch.float32)
    slow = rubbish(*parts)
    fast = there(slow)
    signs.encode_sign(x.to(ON), *fast)
    signs_reference.encode_signs(x, slow[0], slow[1], None)
    signs_reference.overall_mean(slow[1], numel, slow[2])
    same(fast, slow)
    fast_residual, new_residual = torch.empty(numel, dtype=dtype, device=ON), torch.add(x, residual)
    signs.encode_sign(x.to(ON), *fast, residual.to(ON), fast_residual)
    signs_reference.encode_signs(new_residual, slow[0], slow[1], None)
    signs_reference.overall_mean(slow[1], numel, slow[2])
    signs_reference.add_signs_([(slow[0], slow[2], None)], -1.0, new_residual, fresh=False)
    same([*fast, fast_residual], [*slow, new_residual])


def test_the_sum_of_many_means() -> None:
    from tacit.kernels.triton import signs as signs_triton

    count = signs_triton.PER_PROGRAM + 77
    numel, means = count * BLOCK - 100, torch.rand(count)
    sums, magnitude, slow = means.to(ON), torch.empty(1, device=ON), torch.empty(1)
    x = torch.empty(numel, device=ON).fill_(1.0)
    bits = torch.empty(-(-numel // 8), dtype=torch.uint8, device=ON)
    if ON == "cpu":  # without the blocks, of which there are too many for the interpreter
        signs_triton.overall_mean(sums, numel, magnitude)
        signs_reference.overall_mean(means, numel, slow)
    else:
        signs.encode_sign(x, bits, sums, magnitude)
        slow.fill_(1.0)
    same([magnitude], [slow])


def sums_are_the_same(
    fast: Callable[..., None],
    slow: Callable[..., None],
    payload: list[Tensor],
    how: object,
    numel: int,
    dtype: torch.dtype,
) -> None:
    """What three peers have sent, added to a tensor and to zeros; `how` it is encoded."""
    for fresh in (False, True):
        out = numbers(numel, seed=2, dtype=dtype)
        fast_out = out.clone().to(ON)
        fast(rows(payload, 3), how, WEIGHT, fast_out, fresh)
        slow([payload] * 3, how, WEIGHT, out, fresh)
        same([fast_out], [out])


def test_one_value_for_all_blocks_and_payloads_anywhere() -> None:
    numel = 1500
    slow = [(numbers(188, seed=peer).to(torch.uint8), torch.tensor([0.5 + peer]), None) for peer in range(3)]
    elsewhere = torch.empty(1000, device=ON)
    fast = [(bits.to(ON), high.to(ON), None) for bits, high, _ in slow]
    out = torch.zeros(numel)
    fast_out = out.to(ON)
    signs.add_signs_(fast, WEIGHT, fast_out, fresh=False)
    signs_reference.add_signs_(slow, WEIGHT, out, fresh=False)
    same([fast_out], [out])
    assert elsewhere.numel()  # keeps the payloads from lying at equal distances by chance of allocation


@pytest.mark.parametrize(("dtype", "bits"), by_type((2,), (3,), (4,), (7,), (8,)))
@pytest.mark.parametrize("numel", [0, 7, 1100, *LARGE])
def test_blocks(dtype: torch.dtype, numel: int, bits: int) -> None:
    parts = (blocks_bytes(numel, bits), torch.uint8), (block_count(numel), torch.bfloat16)
    slow = rubbish(*parts)
    fast = there(slow)
    for kind in ("mixed", "denormal", "huge")[: 3 if bits == 3 else 1]:
        x, residual = numbers(numel, kind, 0, dtype), old_residual(numel, kind, dtype)
        blockwise.encode_blocks(x.to(ON), bits, *fast)
        blockwise_reference.encode_blocks(x, bits, *slow)
        same(fast, slow)
        fast_residual, new_residual = torch.empty(numel, dtype=dtype, device=ON), torch.add(x, residual)
        blockwise.encode_blocks(x.to(ON), bits, *fast, residual.to(ON), fast_residual)
        blockwise_reference.encode_blocks(new_residual, bits, *slow)
        blockwise_reference.add_blocks_([slow], bits, -1.0, new_residual, fresh=False)
        same([*fast, fast_residual], [*slow, new_residual])
    sums_are_the_same(blockwise.add_blocks_, blockwise_reference.add_blocks_, slow, bits, numel, dtype)


@pytest.mark.parametrize(
    ("dtype", "bits", "bucket", "clip"),
    by_type((2, 512, 2.5), (3, 64, levels.BY_NORM), (4, 512, levels.BY_LARGEST), (4, 512, levels.BY_NORM),
            (4, 128, 1.0), (5, 128, 1.0), (6, 64, levels.BY_LARGEST), (7, 64, 2.5),
            (8, 1024, levels.BY_NORM)),
)  # fmt: skip
@pytest.mark.parametrize("numel", [0, 7, 1100, *LARGE])
def test_levels(dtype: torch.dtype, numel: int, bits: int, bucket: int, clip: float) -> None:
    slow = rubbish((code_bytes(numel, bits), torch.uint8), (bucket_count(numel, bucket), torch.float32))
    fast = there(slow)
    for seed, kind in ((2**64 - 5, "mixed"), (2**31, "denormal"), (1, "huge"))[: 3 if bits == 4 else 1]:
        x = numbers(numel, kind, 0, dtype)
        levels.quantize(x.to(ON), bits, bucket, clip, seed, fast[0], fast[1])
        levels_reference.quantize(x, bits, bucket, clip, seed, slow[0], slow[1])
        same(fast, slow)
    out = numbers(numel, seed=2, dtype=dtype)
    fast_out = out.clone().to(ON)
    levels.add_levels_(rows(slow, 3), bits, bucket, WEIGHT, fast_out, fresh=False)
    levels_reference.add_levels_([slow] * 3, bits, bucket, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("numel", SIZES)
@EACH
def test_int8(dtype: torch.dtype, kind: str, numel: int) -> None:
    x, residual = numbers(numel, kind, 0, dtype), old_residual(numel, kind, dtype)
    slow = rubbish((numel, torch.uint8), (block_count(numel), torch.float32))
    fast = there(slow)
    int8.encode_int8(x.to(ON), fast[0], fast[1])
    int8_reference.encode_int8(x, slow[0], slow[1])
    same(fast, slow)
    new_residual = torch.add(x, residual)
    fast_residual = torch.empty(numel, dtype=dtype, device=ON)
    int8.encode_int8(x.to(ON), fast[0], fast[1], residual.to(ON), fast_residual)
    int8_reference.encode_int8(new_residual, slow[0], slow[1])
    int8_reference.add_int8_([slow], -1.0, new_residual, fresh=False)
    same([*fast, fast_residual], [*slow, new_residual])
    out = numbers(numel, seed=2, dtype=dtype)
    fast_out = out.clone().to(ON)
    int8.add_int8_(rows(slow, 3), WEIGHT, fast_out, fresh=False)
    int8_reference.add_int8_([slow] * 3, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@TYPES
def test_fp8_payloads(dtype: torch.dtype, kind: torch.dtype, numel: int) -> None:
    every = (torch.arange(256) * 37 % 256).to(torch.uint8)  # NaN and infinity too
    slow = [every.repeat(-(-numel // 256))[:numel].clone(), torch.tensor([0.37])]
    sums_are_the_same(fp8.add_fp8_, fp8_reference.add_fp8_, slow, kind, numel, dtype)


@pytest.mark.parametrize(
    ("numel", "bits"), [(0, 3), (70, 2), *[(n, b) for n in (600, *LARGE) for b in (2, 3, 4)]]
)
def test_entropy_coded_as_on_the_host(numel: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of numbers that get shorter, and of such as do not; and nothing is written of a damaged message."""
    if not LARGE:
        monkeypatch.setattr(entropy, "PIECE", 64)
    for x in (numbers(numel), numbers(numel) * (torch.arange(numel) % 512 == 0)):
        codes, units = rubbish((blocks_bytes(numel, bits), torch.uint8), (block_count(numel), torch.bfloat16))
        blockwise_reference.encode_blocks(x, bits, codes, units)
        message = entropy.encode_codes(codes, bits, numel)
        (told,) = there(rubbish((entropy.longest(numel, bits), torch.uint8)))
        length = entropy.encode_on_device(codes.to(ON), bits, numel, told)
        assert int(length) == message.numel()
        told = told[: len(message)]
        same([told], [message])
        damaged = 3 if message[0] == entropy.CODED and bits != 4 else 0
        messages, lengths = told.repeat(damaged or 1, 1), length.repeat(damaged or 1)
        if damaged:
            messages[0, 1] ^= 4
            messages[1, -3] ^= 4
            lengths[2] -= 2
        messages, lengths = torch.cat((messages, told[None])), torch.cat((lengths, length[None]))
        kept = rubbish((codes.numel(), torch.uint8))
        back = kept[0].to(ON).repeat(len(messages), 1)
        good = entropy.decode_on_device(messages, lengths, bits, numel, back)
        assert [bool(each) for each in good] == [not damaged] * (len(good) - 1) + [True]
        same([*back], (kept * damaged or [codes]) + [codes])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.uint8, *([torch.float32, torch.int32] if LARGE else [])]
)
def test_entropy_of_planes_as_on_the_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor after the other, of each kind of plane; and a damaged message ends nowhere."""
    if not LARGE:
        monkeypatch.setattr(entropy, "PIECE", 192)
    levels = (5 * torch.randn(500, generator=torch.Generator().manual_seed(0))).abs().to(dtype)
    parts = [levels, levels[:70], levels[:0], torch.ones(200).to(dtype)]
    parts += [numbers(numel).abs().to(dtype) for numel in LARGE]
    message = byte_planes.encode_planes(parts)
    (told,) = there(rubbish((byte_planes.most_bytes(parts), torch.uint8)))
    at = torch.zeros((), dtype=torch.int32, device=ON)
    for part in parts:
        at = byte_planes.encode_on_device(part.to(ON), told, at)
    assert int(at) == message.numel()
    told = told[: len(message)]
    same([told], [message])
    damage = ((0, 8), (40, 1), (90, 128)) if LARGE or dtype == torch.uint8 else ()
    changes = (*(damage or ((0, 0),)), (0, 0))
    messages, lengths = told.repeat(len(changes), 1), at.repeat(len(changes))
    for each, (spot, by) in zip(messages, changes, strict=True):
        each[spot] ^= by
    at = torch.zeros_like(lengths)
    for part in parts:
        found = part.new_full((len(changes), len(part)), 0b10101010).to(ON)
        at = byte_planes.decode_on_device(messages, lengths, at, found)
        same([found[-1]], [part])
    assert at.tolist() == [-1 if by else len(message) for _, by in changes]


@pytest.mark.parametrize("numel", SIZES)
def test_rounding_to_bf16_at_random(numel: int) -> None:
    x = numbers(numel, "mixed")
    x[3::50], x[4::50] = math.nan, math.inf
    slow = torch.full((numel,), 3.0, dtype=torch.bfloat16)
    (fast,) = there([slow])
    narrow.round_at_random(x.to(ON), 2**61 + numel, fast)
    narrow_reference.round_at_random(x, 2**61 + numel, slow)
    same([fast], [slow])


@pytest.mark.parametrize("numel", SIZES)
@EACH
def test_exponents(dtype: torch.dtype, kind: str, numel: int) -> None:
    x = numbers(numel, kind, 0, dtype)
    slow = rubbish((numel, torch.uint8), (-(-numel // 8), torch.uint8))
    fast = there(slow)
    exponents.encode_exponents(x.to(ON), 2**63 + numel, fast[0], fast[1])
    exponents_reference.encode_exponents(x, 2**63 + numel, slow[0], slow[1])
    same(fast, slow)
    out = numbers(numel, seed=2, dtype=dtype)
    fast_out = out.clone().to(ON)
    exponents.add_exponents_(rows(slow, 3), WEIGHT, fast_out, fresh=False)
    exponents_reference.add_exponents_([slow] * 3, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("threshold", [0.1, 2.0, 1e30])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("numel", [1, 4096, 4097, 20_000])
def test_the_pass_of_select(numel: int, with_residual: bool, threshold: float) -> None:
    x, residual = numbers(numel), numbers(numel, seed=1) if with_residual else None
    x[numel // 2 :: 999] = math.nan
    x[numel // 3 :: 999] = -math.inf
    new_residual = torch.zeros(numel) if with_residual else None
    slow = EntryBuffer(torch.zeros(numel + MARGIN, dtype=torch.int32), torch.zeros(numel + 1024))
    fast = EntryBuffer(*there(list(slow)))
    mine = None if residual is None else residual.to(ON)
    fast_residual = None if new_residual is None else new_residual.to(ON)
    here = select.select_reaching(x.to(ON), threshold, fast, mine, fast_residual)
    found = select_reference.select_reaching(x, threshold, slow, residual, new_residual)
    assert here is not None
    assert found is not None
    same([*here], [*found])
    if fast_residual is not None and new_residual is not None:
        same([fast_residual], [new_residual])


def test_a_buffer_that_is_too_small_is_told() -> None:
    x = torch.ones(5000, device=ON)
    assert (
        select.select_reaching(x, 0.5, EntryBuffer(x.new_empty(4999, dtype=torch.int32), x.new_empty(4999)))
        is None
    )


SMALL = [(1, 1.0), (300, 0.0), (300, 0.3), (300, 1.0), (9000, 0.1)]


@pytest.mark.parametrize(
    ("numel", "ratio"), SMALL + [(numel, ratio) for numel in LARGE for ratio in (0.0, 0.01, 0.3, 1.0)]
)
@TYPES
def test_exactly_the_largest_are_chosen(dtype: torch.dtype, ratio: float, numel: int) -> None:
    k = max(1, int(ratio * numel))
    for x, residual in drawn(numel, dtype):
        a = x if residual is None else x + residual
        rank = torch.where(a.isnan(), -1.0, a.abs().double())
        expected = rank.sort(descending=True, stable=True).indices[:k].sort().values
        new_residual = None if residual is None else torch.empty(numel, dtype=dtype, device=ON)
        before = None if residual is None else residual.to(ON)
        index, values = select.select_largest(x.to(ON), k, residual=before, new_residual=new_residual)
        same([index, values], [expected.to(torch.int32), a[expected]])
        if new_residual is not None:
            same([new_residual], [a.index_fill(0, expected, 0.0)])


def test_they_are_chosen_where_a_program_counts_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.kernels.triton import select as kernels

    monkeypatch.setattr(kernels, "COUNTING", 2)
    monkeypatch.setattr(kernels, "COLLECTING", 2)
    test_exactly_the_largest_are_chosen(torch.float32, 0.02, 21_000)


def drawn(numel: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor | None]]:
    """Numbers that differ, with what is new_residual; many that tie, with NaN and infinity; all the same."""
    ties = numbers(numel).round_()
    ties[numel // 2 :: 999] = math.nan
    ties[numel // 3 :: 999] = -math.inf
    return [
        (numbers(numel, dtype=dtype), numbers(numel, seed=1, dtype=dtype)),
        (ties.to(dtype), numbers(numel, "zero", dtype=dtype)),
        (torch.full((numel,), -2.0, dtype=dtype), None),
    ]


@pytest.mark.parametrize("numel", [1, 300, 9000, *LARGE])
@pytest.mark.parametrize(("per_chunk", "chunk"), [(41, 4096), (1, 1000), (4000, 4096)])
@TYPES
def test_the_largest_of_each_chunk(dtype: torch.dtype, per_chunk: int, chunk: int, numel: int) -> None:
    k = numel // chunk * per_chunk + min(per_chunk, numel % chunk)
    for x, residual in drawn(numel, dtype):
        slow = rubbish((k, torch.int32), (k, dtype), (numel, dtype))
        fast = there(slow)
        given = (None, None) if residual is None else (residual.to(ON), fast[2])
        select.select_in_chunks(x.to(ON), per_chunk, chunk, EntryBuffer(*fast[:2]), *given)
        select_reference.select_in_chunks(
            x, per_chunk, chunk, EntryBuffer(*slow[:2]), residual, None if residual is None else slow[2]
        )
        same(fast, slow)


@pytest.mark.parametrize("ratio", [0.01, 0.3])
@TYPES
def test_the_same_are_chosen_in_plain_torch(dtype: torch.dtype, ratio: float) -> None:
    numel, per_chunk = LARGE[-1] if LARGE else 20_000, int(ratio * 4096)
    many = numel // 4096 * per_chunk + min(per_chunk, numel % 4096)
    for x, _ in drawn(numel, dtype):
        slow = rubbish((many, torch.int32), (many, dtype))
        for choose in (
            partial(select_reference.select_largest, k=many),
            partial(select_reference.select_in_chunks, per_chunk=per_chunk, chunk=4096),
        ):
            fast = there(slow)
            choose(x, buffer=EntryBuffer(*slow))
            choose(x.to(ON), buffer=EntryBuffer(*fast))
            same(fast, slow)


# ---- positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "k"),
    [(1, 1), (257, 3), (1000, 10), (1000, 999), (70_001, 7), (100_003, 30_000), (3_000_000, 300)],
)
def test_positions(numel: int, k: int) -> None:
    whole = (
        torch.randperm(numel, generator=torch.Generator().manual_seed(k))[:k].sort().values.to(torch.int32)
    )
    for index in (whole, whole[: k // 2]):
        (slow,) = rubbish((position_bytes(numel, k), torch.uint8))
        (fast,) = there([slow])
        pack_positions(index.to(ON), numel, k, fast)
        positions_reference.pack_positions(index, numel, k, slow)
        same([fast], [slow])
        expected = torch.full((k,), -1, dtype=torch.int32)
        expected[: index.numel()] = index
        same([unpack_positions(fast, numel, k)], [expected])
    pack_positions(expected.to(ON), numel, k, fast)  # half of them are absent
    same([fast], [slow])
    damaged = torch.randint(0, 256, slow.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    harmless = unpack_positions(damaged.to(ON), numel, k)
    with emulated_device():
        same([harmless], [*positions_reference.unpack_all([damaged], numel, k)])
    out = torch.zeros(numel, device=ON)
    scatter_add_(harmless, torch.ones(k, device=ON), out)
    clear_(harmless, out)


@pytest.mark.parametrize(("numel", "k"), [(1, 1), (257, 3), (1000, 999), (70_001, 7), (100_003, 3000)])
def test_positions_of_several_peers(numel: int, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    rows = [torch.randperm(numel, generator=generator)[:k].sort().values for _ in range(3)]
    rows[1] = rows[1][: k // 2]
    message = torch.empty(3, position_bytes(numel, k), dtype=torch.uint8, device=ON)
    for index, packed in zip(rows, message, strict=True):
        pack_positions(index.to(ON, torch.int32), numel, k, packed)
    elsewhere = [message[0], message[1].clone(), torch.empty(64, device=ON), message[2].clone()]
    for peers in ([*message], [elsewhere[i] for i in (0, 1, 3)]):
        for index, found in zip(rows, unpack_all(peers, numel, k), strict=True):
            same([found], [torch.cat([index, index.new_full((k - len(index),), -1)]).to(torch.int32)])


@pytest.mark.parametrize("weight", [1.0, 1 / 3, 1e-40])
@TYPES
def test_scattering_and_clearing(dtype: torch.dtype, weight: float) -> None:
    index = torch.randperm(10_007, generator=torch.Generator().manual_seed(6))[:1999].sort().values
    values, out = numbers(1999, dtype=dtype), numbers(10_007, seed=2, dtype=dtype)
    fast_out = out.clone().to(ON)
    scatter_add_(index.to(ON, torch.int32), values.to(ON), fast_out, weight)
    out.index_add_(0, index, values, alpha=weight)
    same([fast_out], [out])
    clear_(index.to(ON, torch.int32), fast_out)
    same([fast_out], [out.index_fill(0, index, 0.0)])


@pytest.mark.parametrize("fresh", [False, True])
@TYPES
def test_scattering_of_all_peers(dtype: torch.dtype, fresh: bool) -> None:
    numel, k = (4_000_003, 40_000) if LARGE else (20_003, 700)
    generator = torch.Generator().manual_seed(8)
    rows = torch.stack([torch.randperm(numel, generator=generator)[:k].sort().values for _ in range(3)])
    rows[2, k // 2 :] = -1  # a payload that lacks some
    values = torch.stack([numbers(k, seed=peer, dtype=dtype) for peer in range(3)])
    out = numbers(numel, seed=2, dtype=dtype)
    index, sent, fast_out = rows.to(ON, torch.int32), values.to(ON), out.clone().to(ON)
    elsewhere = [*map(Selection, [*index[:2], index[2].clone()], sent)]
    apart = fast_out.clone()
    scatter_all_([*map(Selection, index, sent)], fast_out, 1 / 3, fresh)
    scatter_all_(elsewhere, apart, 1 / 3, fresh)
    if fresh:
        out.zero_()
    for places, row in zip(rows, values, strict=True):
        out.index_add_(0, places[places >= 0], row[places >= 0], alpha=1 / 3)
    same([fast_out, apart], [out, out])


def test_a_position_outside_is_left_out() -> None:
    whole = torch.zeros(200, device=ON)
    for bad in (150, -3):
        index = torch.tensor([5, bad], dtype=torch.int32, device=ON)
        scatter_add_(index, torch.ones(2, device=ON), whole[10:110])
    assert float(whole.sum()) == float(whole[15]) == 2.0
    whole.fill_(1.0)
    clear_(torch.tensor([5, 150, -3], dtype=torch.int32, device=ON), whole[10:110])
    assert float(whole.sum()) == 199.0


# ---- low rank -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 3e37, 1e-42])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_rows_are_scaled_and_made_orthogonal(rank: int, size: float) -> None:
    lengths = (1, 3, 64, 65, 700, 129, 5000)
    p = torch.randn(rank * sum(lengths), generator=torch.Generator().manual_seed(rank)) * size
    p[2 * rank : 3 * rank] = 0.0
    scaled, fast_scaled = p.clone(), p.clone().to(ON)
    orthogonal.scale_(fast_scaled, lengths, rank)
    orthogonal_reference.scale_(scaled, lengths, rank)
    same([fast_scaled], [scaled])
    fast = p.clone().to(ON)
    orthogonal.orthogonalize_(fast, lengths, rank)
    orthogonal_reference.orthogonalize_(p, lengths, rank)
    torch.testing.assert_close(fast.cpu(), p, atol=2e-5, rtol=0)


MATRICES = ((3, 20, 7), (150, 1, 130), (290, 33, 65), (2435, 1100, 3), (5735, 2, 2))
"""With gaps before and after some of them, and one whose rows are split."""


@pytest.mark.parametrize("rank", [1, 3, 4])
def test_products_of_matrices_with_factors(rank: int) -> None:
    x, p, q = factors(rank)
    total, here = x.double(), [each.to(ON) for each in (x, p, q)]

    def each() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """M, P' and Q' of each matrix, in fp64."""
        at_p = at_q = 0
        for start, rows, columns in MATRICES:
            end_p, end_q = at_p + rank * rows, at_q + rank * columns
            yield (
                total[start : start + rows * columns].view(rows, columns),
                p[at_p:end_p].view(rank, rows).double(),
                q[at_q:end_q].view(rank, columns).double(),
            )
            at_p, at_q = end_p, end_q

    fast = torch.full_like(here[1], torch.nan)
    assert products.times_q_(here[0], fast, here[2], MATRICES, rank)
    close(fast, torch.cat([(b @ m.T).flatten() for m, _, b in each()]))
    fast = torch.full_like(here[2], torch.nan)
    assert products.times_p_(here[0], here[1], fast, MATRICES, rank)
    close(fast, torch.cat([(a @ m).flatten() for m, a, _ in each()]))
    for subtract in (True, False):
        fast = here[0].clone()
        assert products.expand_(fast, here[1], here[2], MATRICES, rank, subtract)
        for m, a, b in each():
            m.copy_(m - a.T @ b if subtract else a.T @ b)
        close(fast, total)
        total = x.double()


def factors(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sizes = 5750, rank * sum(m[1] for m in MATRICES), rank * sum(m[2] for m in MATRICES)
    x, p, q = (torch.randn(size, generator=generator) for size in sizes)
    return x, p, q


def close(fast: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(fast.cpu().double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("numel", [1, 300, *LARGE])
@pytest.mark.parametrize("width", [1, 4, 6, 8])
@TYPES
def test_predictions(dtype: torch.dtype, width: int, numel: int) -> None:
    torch.manual_seed(width)
    network = MP2Network(width)
    nn.init.normal_(network.last.weight)
    weights = {name: p.detach() for name, p in network.named_parameters()}
    packed = mp2_network.packed_weights(weights)
    changes = torch.stack([numbers(numel, "mixed", seed, dtype) for seed in (0, 1)])
    varying = torch.randint(1, 9, (2, numel)).float(), torch.randn(2, numel)
    for ages, swings in (varying, (torch.tensor([[2.0], [1.0]]), torch.zeros(2, 1))):
        slow, fast = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype, device=ON)
        mp2_network_reference.predict_changes(changes, ages, swings, packed, width, 5.0, slow)
        on = [each.to(ON) for each in (changes, ages, swings, packed)]
        mp2_network.predict_changes(*on, width, 5.0, fast)
        same([fast], [slow])
        seen = Seen(changes, ages.expand(changes.shape), swings.exp2().expand(changes.shape))
        x, size = normalised(seen)
        unit = torch.where(size > 0, size, 1.0)
        if dtype == torch.float32:
            delta = run(weights, x).clamp(-5, 5)
            torch.testing.assert_close(slow / unit, torch.where(size > 0, delta, 0.0), rtol=1e-3, atol=1e-4)


def test_products_that_no_kernel_was_written_for_are_left_to_torch() -> None:
    x, p, q = (each.to(ON) for each in factors(1))
    assert not products.times_q_(x.bfloat16(), p.bfloat16(), q.bfloat16(), MATRICES, 1)
    assert not products.times_q_(x, p, q, MATRICES, 17)
