import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.kernels.select import SAMPLE, select_largest


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
