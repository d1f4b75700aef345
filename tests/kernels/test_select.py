import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.kernels.select import SAMPLE, at_least, at_least_torch, path, select_largest


@pytest.mark.parametrize("numel", [1, 7, 1000, 2 * SAMPLE + 1, 500_003])
@pytest.mark.parametrize("ratio", [0.0001, 0.001, 0.01, 0.1, 0.3, 1.0])
def test_the_set_is_that_of_topk(numel: int, ratio: float) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)) ** 3
    k = max(1, int(ratio * numel))
    index, values = select_largest(x, k)
    assert index.dtype == torch.int32
    assert index.numel() == index.unique().numel() == k
    assert torch.equal(values, x[index])
    expected = torch.topk(x.abs(), k, sorted=True).values
    assert torch.equal(values.abs().sort(descending=True).values, expected)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**31), st.sampled_from(["rows", "zeros", "steps", "one"]))
def test_awkward_tensors_still_give_exactly_k(k: int, seed: int, kind: str) -> None:
    numel = 2 * SAMPLE + 17
    x = torch.zeros(numel)
    if kind == "rows":  # large entries in step with any stride that divides 512
        x[::512] = 1 + torch.rand(x[::512].shape, generator=torch.Generator().manual_seed(seed))
    if kind == "steps":
        x = torch.arange(numel).float() % 3
    if kind == "one":
        x[seed % numel] = -1
    index, values = select_largest(x, k)
    assert index.unique().numel() == k
    expected = torch.topk(x.abs(), k).values
    assert torch.equal(values.abs().sort(descending=True).values, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 31, 32, 33, 300_007])
def test_the_fast_scan_equals_the_reference(numel: int, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    assert path() == "numba"
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(2))
    for threshold in (0.0, 0.5, 3.0, 100.0):
        fast, reference = at_least(x, threshold, numel), at_least_torch(x, threshold, numel)
        assert fast is not None
        assert reference is not None
        assert torch.equal(fast.long(), reference.long())


def test_too_many_hits_are_told_and_not_written_past_the_end() -> None:
    x = torch.ones(100_000)
    assert at_least(x, 0.5, 99_000) is None
    assert at_least_torch(x, 0.5, 99_000) is None


def test_a_sample_that_misleads_costs_time_and_not_exactness() -> None:
    numel = 4 * SAMPLE
    stride = (numel // SAMPLE) | 1
    for in_sample, elsewhere in ((10.0, 1.0), (1.0, 10.0)):
        x = torch.full((numel,), elsewhere)
        x[::stride] = in_sample
        x += torch.arange(numel) * 1e-7
        index, _ = select_largest(x, 500)
        assert set(index.tolist()) == set(torch.topk(x.abs(), 500).indices.tolist())
