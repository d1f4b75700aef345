"""Merging lists of entries: compiled as in plain torch, and both as a dense sum says."""

import math

import torch
from host_sync import NoHostSync
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import for_each
from tacit.kernels.dispatch import emulated_device
from tacit.kernels.entry_buffers import EntryBuffer, Selection
from tacit.kernels.merge import common_positions, keep_arrived, merge_largest
from tacit.kernels.reference import merge as reference

NUMEL = 40
# Few numbers, so that magnitudes tie and sums vanish; and those that need care.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 3e38, 1e-45, math.inf, -math.inf, math.nan])
LISTS = st.dictionaries(st.integers(0, NUMEL - 1), NUMBERS, max_size=NUMEL)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def selection(entries: dict[int, float], dtype: torch.dtype = torch.float32) -> Selection:
    at = sorted(entries)
    return Selection(
        torch.tensor(at, dtype=torch.int32), torch.tensor([entries[each] for each in at], dtype=dtype)
    )


def buffer(places: int, dtype: torch.dtype = torch.float32) -> EntryBuffer:
    return EntryBuffer(
        torch.full((places,), -9, dtype=torch.int32), torch.full((places,), math.nan, dtype=dtype)
    )


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=7e30), other.nan_to_num(nan=7e30))


@settings(max_examples=200, deadline=None)
@given(one=LISTS, other=LISTS, k=st.integers(1, NUMEL), dtype=DTYPES)
def test_the_k_largest_of_both(
    one: dict[int, float], other: dict[int, float], k: int, dtype: torch.dtype
) -> None:
    total = {i: [each[i] for each in (one, other) if i in each] for i in {*one, *other}}
    numbers = {i: float(torch.tensor(each, dtype=dtype).sum()) for i, each in total.items()}

    def rank(i: int) -> tuple[float, int]:
        return (1.0 if math.isnan(numbers[i]) else -abs(numbers[i]), i)

    kept = sorted(sorted(numbers, key=rank)[:k])
    expected = torch.tensor([numbers[i] for i in kept], dtype=dtype)
    a, b = selection(one, dtype), selection(other, dtype)
    for merge in (merge_largest, reference.merge_largest):
        for pair in ((a, b), (b, a)):
            got = merge(*pair, k, buffer(len(one) + len(other), dtype))
            assert got.positions.tolist() == kept
            assert equal(got.values, expected)


@settings(max_examples=100, deadline=None)
@given(one=LISTS, other=LISTS)
def test_what_both_have_and_what_arrived(one: dict[int, float], other: dict[int, float]) -> None:
    both = sorted({*one} & {*other})
    a, b = selection(one), selection(other)
    places = [sorted(other).index(i) for i in both]
    for at, where in (
        common_positions(
            a.positions, b.positions, torch.empty_like(a.positions), torch.empty_like(a.positions)
        ),
        common_positions(again := a.positions.clone(), b.positions, again, torch.empty_like(a.positions)),
        reference.common_positions(a.positions, b.positions, a.positions, b.positions),
    ):
        assert (at.tolist(), where.tolist()) == (both, places)
    for way in (
        lambda residual: keep_arrived(a, b.positions, buffer(len(one)), residual),
        lambda residual: reference.keep_arrived(a, b.positions, buffer(0), residual),
    ):
        residual = torch.full((NUMEL,), 9.0)
        mine = way(residual)
        assert mine.positions.tolist() == both
        assert equal(mine.values, torch.tensor([one[i] for i in both]))
        rest = [9.0 + (one.get(i, 0.0) if i not in other else 0.0) for i in range(NUMEL)]
        assert equal(residual, torch.tensor(rest))
        assert way(None).positions.tolist() == both


def test_many_entries_as_few() -> None:
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        lists = []
        for _ in range(2):
            at = torch.randperm(100_000, generator=generator)[:20_000].sort().values.to(torch.int32)
            lists.append(Selection(at, torch.randn(20_000, generator=generator, dtype=dtype) ** 3))
        buffers = buffer(40_000, dtype), buffer(40_000, dtype)
        fast, slow = (
            merge_largest(*lists, 20_000, buffers[0]),
            reference.merge_largest(*lists, 20_000, buffers[1]),
        )
        assert torch.equal(fast.positions, slow.positions)
        assert torch.equal(fast.values, slow.values)


@for_each("seed", range(12))
def test_on_a_device_the_same_is_kept_in_lists_of_a_fixed_length(seed: int) -> None:
    numel, k = 40, 15
    draw = torch.Generator().manual_seed(seed)
    residual = torch.zeros(numel)

    def drawn() -> Selection:
        positions = torch.randperm(numel, generator=draw)[:k].sort().values.to(torch.int32)
        values = torch.randint(-2, 3, (k,), generator=draw).float()  # many are as large as others
        values[seed % k] = math.nan if seed % 3 == 0 else math.inf
        return Selection(positions, values)

    one, other = drawn(), drawn()
    whole = merge_largest(one, other, k, buffer(2 * k))
    arrived, where = common_positions(one.positions, whole.positions, *(torch.empty(k).int() for _ in "12"))
    kept = keep_arrived(one, arrived, buffer(k), residual)
    owed = torch.zeros(numel)
    both, rest, lists = buffer(2 * k), buffer(k), [torch.empty(k).int() for _ in "12"]
    with emulated_device(), NoHostSync():
        fixed = merge_largest(one, other, k, both)
        came, at = common_positions(one.positions, fixed.positions, *lists)
        left = keep_arrived(one, came, rest, owed)
    assert equal(fixed.positions, whole.positions)
    assert equal(fixed.values, whole.values)
    for found, expected in ((came, arrived), (at, where), (left.positions, kept.positions)):
        assert len(found) == k
        assert equal(found[found >= 0], expected)
    assert equal(left.values[left.positions >= 0], kept.values)
    assert equal(owed, residual)
