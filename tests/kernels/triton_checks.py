"""The Triton kernels against the references on the CPU, bit for bit; run by `test_triton`.

On a GPU, or in Triton's interpreter (TRITON_INTERPRET=1 and TACIT_KERNELS=triton), where sizes are small.
The references run on the CPU: on CUDA, torch divides by a scalar by multiplying by its inverse.
"""

import math
import os

import pytest
import torch
from torch import Tensor

from tacit.errors import TacitError
from tacit.kernels import exponents, int8, levels, select, signs
from tacit.kernels.layout import buckets, code_bytes
from tacit.kernels.pick import path
from tacit.kernels.positions import scatter_add_

ON = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
LARGE = [] if ON == "cpu" else [5000, 512 * 8192 + 77]
"""Not in the interpreter, which takes a second for each."""
SIZES = [0, 7, 512, 1100, *LARGE]
KINDS = ["huge", "denormal", "zero", "mixed"]
WEIGHT = 1 / 3


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy's, under the interpreter


@pytest.fixture(autouse=True)
def _triton() -> None:
    assert path(ON) == "triton"


def numbers(numel: int, kind: str = "normal", seed: int = 0) -> Tensor:
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
    return x


def rubbish(*shapes: tuple[int, torch.dtype]) -> list[Tensor]:
    return [torch.full((numel,), 0b10101010, dtype=dtype) for numel, dtype in shapes]


def there(tensors: list[Tensor]) -> list[Tensor]:
    """The same on the device, each a tensor of its own."""
    return [each.clone().to(ON) for each in tensors]


def same(fast: list[Tensor], slow: list[Tensor]) -> None:
    for a, b in zip(fast, slow, strict=True):
        assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


def rows(payload: list[Tensor], peers: int) -> list[list[Tensor]]:
    """The payload of each of several peers, as rows of messages; on the device."""
    columns = [each.repeat(peers, 1).to(ON) for each in payload]
    return [list(payload) for payload in zip(*columns, strict=True)]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str, two: bool, numel: int) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, "zero" if kind == "huge" else kind, seed=1)
    count = signs.blocks(numel)
    bits, highs, *lows = rubbish((-(-numel // 8), torch.uint8), *[(count, torch.float32)] * (2 if two else 1))
    slow = [bits, highs, *lows]
    fast = there(slow)
    signs.encode_signs(x.to(ON), fast[0], fast[1], fast[2] if two else None)
    signs.encode_signs_torch(x, bits, highs, lows[0] if two else None)
    same(fast, slow)
    for keep in (False, True):
        owed = torch.empty(numel)
        fast_owed = owed.to(ON)
        low = fast[2] if two else None
        signs.encode_signs_owed(x.to(ON), residual.to(ON), fast_owed, fast[0], fast[1], low, keep)
        torch.add(x, residual, out=owed)
        signs.encode_signs_torch(owed, bits, highs, lows[0] if two else None)
        if keep:
            signs.add_signs_torch_([(bits, highs, lows[0] if two else None)], -1.0, owed, fresh=False)
        same([*fast, fast_owed], [*slow, owed])
    for fresh in (False, True):
        out = numbers(numel, seed=2)
        fast_out = out.to(ON)
        sent = [(p[0], p[1], p[2] if two else None) for p in rows(slow, 3)]
        signs.add_signs_(sent, WEIGHT, fast_out, fresh)
        signs.add_signs_torch_([(bits, highs, lows[0] if two else None)] * 3, WEIGHT, out, fresh)
        same([fast_out], [out])


def test_one_value_for_all_blocks_and_payloads_anywhere() -> None:
    numel = 1500
    slow = [(numbers(188, seed=peer).to(torch.uint8), torch.tensor([0.5 + peer]), None) for peer in range(3)]
    elsewhere = torch.empty(1000, device=ON)
    fast = [(bits.to(ON), high.to(ON), None) for bits, high, _ in slow]
    out = torch.zeros(numel)
    fast_out = out.to(ON)
    signs.add_signs_(fast, WEIGHT, fast_out, fresh=False)
    signs.add_signs_torch_(slow, WEIGHT, out, fresh=False)
    same([fast_out], [out])
    assert elsewhere.numel()  # keeps the payloads from lying at equal distances by chance of allocation


@pytest.mark.parametrize(
    ("bits", "bucket", "clip"),
    [(2, 512, 2.5), (3, 64, levels.BY_NORM), (4, 512, levels.BY_LARGEST), (4, 512, levels.BY_NORM),
     (4, 128, 1.0), (5, 128, 1.0), (6, 64, levels.BY_LARGEST), (7, 64, 2.5), (8, 1024, levels.BY_NORM)],
)  # fmt: skip
@pytest.mark.parametrize("numel", [0, 7, 1100, *LARGE])
def test_levels(numel: int, bits: int, bucket: int, clip: float) -> None:
    slow = rubbish((code_bytes(numel, bits), torch.uint8), (buckets(numel, bucket), torch.float32))
    fast = there(slow)
    for seed, kind in ((2**64 - 5, "mixed"), (2**31, "denormal"), (1, "huge"))[: 3 if bits == 4 else 1]:
        x = numbers(numel, kind)
        levels.quantize(x.to(ON), bits, bucket, clip, seed, fast[0], fast[1])
        levels.quantize_torch(x, bits, bucket, clip, seed, slow[0], slow[1])
        same(fast, slow)
    out = numbers(numel, seed=2)
    fast_out = out.to(ON)
    levels.add_levels_(rows(slow, 3), bits, bucket, WEIGHT, fast_out, fresh=False)
    levels.add_levels_torch_([slow] * 3, bits, bucket, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_int8(kind: str, numel: int) -> None:
    x, residual = numbers(numel, kind), 0.5 * numbers(numel, "zero" if kind == "huge" else kind, seed=1)
    slow = rubbish((numel, torch.uint8), (buckets(numel, int8.BLOCK), torch.float32))
    fast = there(slow)
    int8.encode_int8(x.to(ON), fast[0], fast[1])
    int8.encode_int8_torch(x, slow[0], slow[1])
    same(fast, slow)
    owed = torch.add(x, residual)
    fast_owed = torch.empty(numel, device=ON)
    int8.encode_int8_owed(x.to(ON), residual.to(ON), fast_owed, fast[0], fast[1])
    int8.encode_int8_torch(owed, slow[0], slow[1])
    int8.add_int8_torch_([slow], -1.0, owed, fresh=False)
    same([*fast, fast_owed], [*slow, owed])
    out = numbers(numel, seed=2)
    fast_out = out.to(ON)
    int8.add_int8_(rows(slow, 3), WEIGHT, fast_out, fresh=False)
    int8.add_int8_torch_([slow] * 3, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_exponents(kind: str, numel: int) -> None:
    x = numbers(numel, kind)
    slow = rubbish((numel, torch.uint8), (-(-numel // 8), torch.uint8))
    fast = there(slow)
    exponents.encode_exponents(x.to(ON), 2**63 + numel, fast[0], fast[1])
    exponents.encode_exponents_torch(x, 2**63 + numel, slow[0], slow[1])
    same(fast, slow)
    out = numbers(numel, seed=2)
    fast_out = out.to(ON)
    exponents.add_exponents_(rows(slow, 3), WEIGHT, fast_out, fresh=False)
    exponents.add_exponents_torch_([slow] * 3, WEIGHT, out, fresh=False)
    same([fast_out], [out])


@pytest.mark.parametrize("threshold", [0.1, 2.0, 1e30])
@pytest.mark.parametrize("owes", [False, True])
@pytest.mark.parametrize("numel", [1, 4096, 4097, 20_000])
def test_the_pass_of_select(numel: int, owes: bool, threshold: float) -> None:
    x, residual = numbers(numel), numbers(numel, seed=1) if owes else None
    x[numel // 2 :: 999] = math.nan
    x[numel // 3 :: 999] = -math.inf
    owed = torch.zeros(numel) if owes else None
    slow = select.Room(torch.zeros(numel + select.SPARE, dtype=torch.int32), torch.zeros(numel + 1024))
    fast = select.Room(*there(list(slow)))
    mine = None if residual is None else residual.to(ON)
    fast_owed = None if owed is None else owed.to(ON)
    here = select.sift(x.to(ON), threshold, fast, mine, fast_owed)
    expected = select.sift_torch(x, threshold, slow, residual, owed)
    assert here is not None
    assert expected is not None
    same([*here], [*expected])
    if fast_owed is not None and owed is not None:
        same([fast_owed], [owed])


def test_a_pass_without_room_says_so() -> None:
    x = torch.ones(5000, device=ON)
    assert select.sift(x, 0.5, select.Room(x.new_empty(4999, dtype=torch.int32), x.new_empty(4999))) is None


@pytest.mark.parametrize("k", [1, 50, 5000])
def test_exactly_the_largest_are_chosen(k: int) -> None:
    x, residual = numbers(40_000), numbers(40_000, seed=1)
    rank = (x + residual).abs().sort(descending=True, stable=True).indices[:k].sort().values
    rest = x + residual
    owed = torch.empty(40_000, device=ON)
    index, values = select.select_largest(x.to(ON), k, residual=residual.to(ON), owed=owed)
    assert torch.equal(index.cpu().long(), rank)
    same([values], [rest[rank]])
    rest[rank] = 0
    same([owed], [rest])


@pytest.mark.parametrize("weight", [1.0, 1 / 3, 1e-40])
def test_scattering(weight: float) -> None:
    index = torch.randperm(10_007, generator=torch.Generator().manual_seed(6))[:1999].sort().values
    values, out = numbers(1999), numbers(10_007, seed=2)
    fast_out = out.to(ON)
    scatter_add_(index.to(ON, torch.int32), values.to(ON), fast_out, weight)
    out.index_add_(0, index, values, alpha=weight)
    same([fast_out], [out])


def test_a_position_outside_is_an_error_and_not_written() -> None:
    whole = torch.zeros(200, device=ON)
    for bad in (150, -3):
        index = torch.tensor([5, bad], dtype=torch.int32, device=ON)
        with pytest.raises(TacitError, match="1 positions"):
            scatter_add_(index, torch.ones(2, device=ON), whole[10:110])
    assert float(whole.sum()) == 2.0
