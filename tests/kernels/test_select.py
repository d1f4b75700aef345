import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from in_threads import in_threads
from tacit.compressors import TopK
from tacit.contracts import Context
from tacit.kernels import dispatch, thread_scratch
from tacit.kernels.dispatch import active_backend
from tacit.kernels.entry_buffers import MARGIN, EntryBuffer, Selection, new_buffer
from tacit.kernels.reference import select as reference
from tacit.kernels.select import select_above, select_in_chunks, select_largest, select_reaching
from tacit.testing.ranks import FreshBuffers

LARGE = 1 << 18
"""Entries from which on the threshold comes from a sample."""
TINY = 2.0**-149


def descending(a: Tensor) -> Tensor:
    """Positions by a stable sort: largest first, of equal ones the lowest position, NaN last."""
    magnitudes = torch.where(a.isnan(), -1.0, a.abs().double())
    return magnitudes.sort(descending=True, stable=True).indices


def ranked(a: Tensor, k: int) -> Tensor:
    """The rule: the first of `descending`, rising."""
    return descending(a)[:k].sort().values


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit."""
    bits = torch.int64 if a.dtype == torch.float64 else torch.int32
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def random(numel: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed)) ** 3


def check(x: Tensor, k: int, residual: Tensor | None = None, order: Tensor | None = None) -> None:
    """What is chosen is what the rule says, and nothing is lost; `order`: of the sum, if known."""
    a = x if residual is None else x + residual
    new_residual = None if residual is None else torch.full_like(x, math.nan)
    looks: list[bool] = []
    index, values = select_largest(
        x, k, residual=residual, new_residual=new_residual, look=lambda: looks.append(True)
    )
    assert looks in ([], [True])
    assert looks or bool(a.isfinite().all())
    assert index.dtype == torch.int32
    order = descending(a) if order is None else order
    assert torch.equal(index.long(), order[:k].sort().values)
    assert same(values, a[index])
    if new_residual is not None:
        rest = a.clone()
        rest[index] = 0
        assert same(new_residual, rest)


def awkward(numel: int) -> dict[str, Tensor]:
    rows, one, some_nan = torch.zeros(numel), torch.zeros(numel), random(numel)
    rows[:: min(512, numel)] = 1 + torch.arange(rows[:: min(512, numel)].numel()) % 7
    one[numel // 2] = -1
    some_nan[:: max(1, numel // 5)] = math.nan
    return {
        "zeros": torch.zeros(numel),
        "minus zeros": -torch.zeros(numel),
        "equal": torch.full((numel,), -3.0),
        "steps": torch.arange(numel).float() % 3,
        "rows": rows,
        "one": one,
        "denormal": torch.arange(numel) % 5 * TINY,
        "largest": torch.where(torch.arange(numel) % 2 == 0, 3.4e38, -3.3e38),
        "infinite": torch.where(torch.arange(numel) % 7 == 0, -math.inf, random(numel)),
        "some nan": some_nan,
        "nan": torch.full((numel,), math.nan),
    }


@pytest.mark.parametrize("numel", [1, 7, 15, 16, 17, 1000, 1025, 40_000, LARGE + 17, (1 << 20) + 3])
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.1, 0.3, 0.97, 1.0])
def test_the_largest_are_chosen_and_the_rest_is_owed(numel: int, ratio: float) -> None:
    k = max(1, int(ratio * numel))
    x, residual, order, order_of_sum = sorted_once(numel)
    check(x, k, order=order)
    check(x, k, residual, order_of_sum)


@functools.cache
def sorted_once(numel: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A tensor, a residual, and the order of the tensor and of the sum; not to be changed."""
    x, residual = random(numel), random(numel, seed=2)
    return x, residual, descending(x), descending(x + residual)


@pytest.mark.parametrize("kind", awkward(1))
@pytest.mark.parametrize("numel", [1, 19, 2000, LARGE + 17])
def test_ties_zeros_and_numbers_at_the_edge(kind: str, numel: int) -> None:
    x, zeros = awkward(numel)[kind], torch.zeros(numel)
    order = descending(x)  # that of the sums too
    for k in {1, min(5, numel), numel // 100 or 1, numel // 2 or 1, numel}:
        check(x, k, order=order)
        check(x, k, zeros, order)
        check(zeros, k, x, order)


@pytest.mark.parametrize("numel", [300, 5000, 300_001])
@pytest.mark.parametrize("owing", [False, True])
def test_one_number_that_is_not_finite_is_looked_at_and_finite_ones_are_not(numel: int, owing: bool) -> None:
    x, residual = random(numel), random(numel, seed=2) if owing else None
    new_residual, looks = torch.empty(numel) if owing else None, [0]

    def look() -> None:
        looks[0] += 1

    select_largest(x, numel // 100, None, residual, new_residual, look)
    assert looks == [0] or active_backend() != "numba"
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        for at in (0, numel // 2, numel - 1):
            broken = x.clone()
            broken[at] = value
            looks = [0]
            select_largest(broken, numel // 100, None, residual, new_residual, look)
            assert looks == [1]
            check(broken, numel // 100, residual)


def test_a_sum_that_overflows_is_the_largest() -> None:
    x = random(5000)
    x[77] = 3e38
    check(x, 1, x)
    assert select_largest(x, 1, residual=x, new_residual=torch.empty(5000)).values.item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    x, residual = random(300_000, dtype), random(300_000, dtype, seed=2)
    a, new_residual = x + residual, torch.empty_like(x)
    index, values = select_largest(x, 3000, residual=residual, new_residual=new_residual)
    assert torch.equal(index.long(), ranked(a, 3000))
    assert torch.equal(values, a[index])
    assert torch.equal(new_residual.index_copy_(0, index.long(), values), a)


def test_of_nothing_nothing_is_chosen() -> None:
    assert select_largest(torch.empty(0), 0).positions.numel() == 0
    assert select_above(torch.empty(0), 1.0, 0).positions.numel() == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**31))
def test_a_single_entry_is_found_wherever_it_is(k: int, seed: int) -> None:
    x = torch.zeros(LARGE + 17)
    x[seed % x.numel()] = -1
    check(x, k)


def test_a_sample_that_misleads_costs_time_and_not_exactness() -> None:
    numel = 1 << 20
    for in_sample, elsewhere in ((10.0, 1.0), (1.0, 10.0)):
        x = torch.full((numel,), elsewhere)
        reference.sample(x, 1).fill_(in_sample)
        x += torch.arange(numel) * 1e-7
        check(x, 500)
        check(x, 500, torch.zeros(numel))


# ---- a threshold that is given ------------------------------------------------------------------------


def test_all_above_a_threshold_are_chosen_and_the_largest_where_they_are_too_many() -> None:
    x, residual = random(LARGE), random(LARGE, seed=2)
    a = x + residual
    there = int((a.abs() >= 2.0).sum())
    for most in (there + 1, there, there - 1, there // 2, 1):
        new_residual = torch.empty_like(x)
        index, values = select_above(x, 2.0, most, residual=residual, new_residual=new_residual)
        assert torch.equal(index.long(), ranked(a, min(most, there)))
        assert same(values, a[index])
        assert same(new_residual.index_copy_(0, index.long(), values), a)


# ---- the compiled versions and the reference ----------------------------------------------------------


def plain_reaching(
    x: Tensor,
    threshold: float,
    buffer: EntryBuffer,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> Selection | None:
    """The reference, as `select_reaching` returns it."""
    return reference.select_reaching(x, threshold, buffer, residual, new_residual)


def full_buffer(x: Tensor) -> EntryBuffer:
    return EntryBuffer(torch.empty(x.numel() + MARGIN, dtype=torch.int32), x.new_empty(x.numel() + MARGIN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1024, 1033, 300_007])
def test_the_compiled_passes_equal_the_reference(numel: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    assert active_backend() == "numba"
    x, residual = random(numel, dtype), random(numel, dtype, seed=2)
    x[numel // 2], x[numel // 3] = math.nan, -math.inf

    def all_of(passes: object) -> list[Tensor]:
        results = []
        for threshold in (0.0, 0.5, 3.0, 1e30, math.nan):
            new_residual = torch.empty_like(x)
            for arguments in ((residual, new_residual), ()):
                found = passes(x, threshold, full_buffer(x), *arguments)  # type: ignore[operator]
                results += [*found, new_residual]
        return results

    for fast, slow in zip(all_of(select_reaching), all_of(plain_reaching), strict=True):
        assert torch.equal(fast.nan_to_num(9.0), slow.nan_to_num(9.0))


def test_too_many_hits_are_told_and_not_written_past_the_end() -> None:
    x = torch.ones(100_000)
    for passes in (select_reaching, plain_reaching):
        whole = EntryBuffer(torch.full((60_000,), 7, dtype=torch.int32), torch.full((60_000,), 7.0))
        buffer = EntryBuffer(whole.positions[:50_000], whole.values[:50_000])
        assert passes(x, 0.5, buffer) is None
        assert passes(x, 0.5, buffer, x, torch.empty_like(x)) is None
        assert bool((whole.positions[50_000:] == 7).all())
        assert bool((whole.values[50_000:] == 7).all())


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**31), st.sampled_from([1.0, 1e-40, 0.0]))
def test_the_nth_largest_is_that_of_a_sort(numel: int, seed: int, scale: float) -> None:
    pytest.importorskip("numba")
    from tacit.kernels.numba.select import nth_largest

    x = scale * random(numel, seed=seed)
    x[::3] = x[0]
    n = 1 + seed % numel
    bits, larger = nth_largest(x.data_ptr(), numel, n)
    least = x.abs().sort(descending=True).values[n - 1]
    assert bits == int(least.view(torch.int32))
    assert larger == int((x.abs() > least).sum())


@pytest.mark.parametrize("equal", [0, 1, 3])
def test_the_exact_choice_equals_its_reference(equal: int) -> None:
    pytest.importorskip("numba")
    from tacit.kernels.numba.select import keep_above

    values = torch.tensor([1.0, -2.0, 2.0, 5.0, -2.0, 0.0, 1.5])
    index = torch.arange(0, 14, 2, dtype=torch.int32)
    new_residual, other = torch.zeros(14), torch.zeros(14)
    here, there = Selection(index.clone(), values.clone()), Selection(index.clone(), values.clone())
    kept = keep_above(here.positions.numpy(), here.values.numpy(), 2.0, equal, new_residual.numpy())
    reference.keep_above(there, 2.0, equal, other)
    assert kept == 1 + equal
    assert torch.equal(here.positions[:kept], there.positions[:kept])
    assert torch.equal(here.values[:kept], there.values[:kept])
    assert torch.equal(new_residual, other)


def test_without_numba_the_same_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, residual = random(LARGE + 5), random(LARGE + 5, seed=2)
    monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu": "torch")
    check(x, 700)
    check(x, 700, residual)


def test_a_buffer_is_used_again() -> None:
    x = random(50_000)
    buffer = new_buffer(x, 500)
    first = select_largest(x, 500, buffer)
    assert first.positions.data_ptr() == buffer.positions.data_ptr()
    assert torch.equal(select_largest(-x, 500, buffer).values, -x[buffer.positions[:500]])


# ---- chunk by chunk -----------------------------------------------------------------------------------


def in_chunks(a: Tensor, per_chunk: int, chunk: int) -> Tensor:
    """The rule, chunk by chunk."""
    starts = range(0, a.numel(), chunk)
    pieces = [a[start : start + chunk] for start in starts]
    found = [
        ranked(piece, min(per_chunk, piece.numel())) + start
        for start, piece in zip(starts, pieces, strict=True)
    ]
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 300, 4096, 4097, 50_001])
@pytest.mark.parametrize(("per_chunk", "chunk"), [(41, 4096), (1, 1000), (256, 256), (4000, 4096)])
def test_the_largest_of_each_chunk(per_chunk: int, chunk: int, numel: int, dtype: torch.dtype) -> None:
    zeros, other = torch.zeros(numel, dtype=dtype), random(numel, dtype, seed=2)
    for x in (each.to(dtype) for each in (random(numel), *awkward(numel).values())):
        plain, of_sum = in_chunks(x, per_chunk, chunk), in_chunks(x + other, per_chunk, chunk)
        for residual, expected in ((None, plain), (zeros, plain), (other, of_sum)):
            a = x if residual is None else x + residual
            buffer = EntryBuffer(torch.empty_like(expected, dtype=torch.int32), a.new_empty(expected.numel()))
            new_residual = None if residual is None else torch.full_like(a, 7.0)
            index, values = select_in_chunks(x, per_chunk, chunk, buffer, residual, new_residual)
            assert torch.equal(index.long(), expected)
            assert torch.equal(values.nan_to_num(9.0), a[expected].nan_to_num(9.0))
            if new_residual is not None:
                assert torch.equal(
                    new_residual.nan_to_num(9.0), a.index_fill(0, expected, 0.0).nan_to_num(9.0)
                )


def test_of_nothing_nothing_is_chosen_in_chunks() -> None:
    buffer = EntryBuffer(torch.empty(0, dtype=torch.int32), torch.empty(0))
    assert select_in_chunks(torch.empty(0), 3, 10, buffer).positions.numel() == 0


def test_a_sample_takes_no_memory_beyond_what_positions_do() -> None:
    def kept(_: int) -> list[tuple[int, torch.dtype]]:
        x, codec = random(1 << 21), TopK(ratio=0.02)
        payload = codec.encode(x, Context(out=x, work=FreshBuffers(), peers=4))
        codec.decode_mean_([payload] * 4, x)
        return [(each.numel(), each.dtype) for each in thread_scratch._BUFFERS.kept.tensors.values()]

    if active_backend() == "numba":
        (found,) = in_threads(1, kept)
        assert found == [(4 * (math.ceil(0.02 * (1 << 21)) + 1), torch.int32)]
