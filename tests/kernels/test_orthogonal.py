"""Rows brought to one scale and made orthogonal: compiled, and in plain torch."""

import math

import pytest
import torch
from torch import Tensor

from tacit.kernels import dispatch
from tacit.kernels.orthogonal import orthogonalize_, scale_

LENGTHS = (1, 3, 64, 65, 700, 129)
EITHER = pytest.mark.parametrize("path", ["numba", "torch"])


def flat(rank: int, dtype: torch.dtype = torch.float32, size: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rank * sum(LENGTHS), generator=generator).mul_(size).to(dtype)


def by_matrix(p: Tensor, rank: int, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    return [part.view(rank, -1) for part in p.split([rank * length for length in lengths])]


@pytest.fixture
def way(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(dispatch, "active_backend", lambda device="cpu": path)


@EITHER
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 3e37])
@pytest.mark.parametrize("rank", [1, 2, 4, 7])
def test_rows_become_orthogonal_and_span_what_they_did(rank: int, size: float) -> None:
    p = flat(rank, size=size)
    before = p.clone()
    orthogonalize_(p, LENGTHS, rank)
    for basis, given in zip(by_matrix(p, rank), by_matrix(before, rank), strict=True):
        length = given.shape[1]
        expected = torch.eye(rank)
        expected[length:] = 0  # more rows than dimensions: what depends on the others is zero
        torch.testing.assert_close(basis @ basis.t(), expected, atol=1e-5, rtol=0)
        unit = given / given.abs().amax()
        torch.testing.assert_close(unit @ basis.t() @ basis, unit, atol=1e-4, rtol=0)


@EITHER
@pytest.mark.usefixtures("way")
def test_rows_that_say_nothing_new_become_zeros() -> None:
    row = flat(1)[:100]
    given = torch.stack([torch.zeros(100), row, -3 * row, 1e-40 * row.abs(), row.flip(0)])
    basis = given.clone().view(-1)
    orthogonalize_(basis, (100,), 5)
    assert [bool(each.any()) for each in basis.view(5, 100)] == [False, True, False, False, True]


@EITHER
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_passed_on(bad: float) -> None:
    p = flat(2)
    p[3] = bad  # of the second matrix
    orthogonalize_(p, LENGTHS, 2)
    assert [bool(each.isfinite().all()) for each in by_matrix(p, 2)] == [True, False, *[True] * 4]


def test_both_ways_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    for rank in (1, 4):
        fast, scaled = flat(rank), flat(rank, size=1e-30)
        orthogonalize_(fast, LENGTHS, rank)
        scale_(scaled, LENGTHS, rank)
        with monkeypatch.context() as patched:
            patched.setattr(dispatch, "active_backend", lambda device="cpu": "torch")
            slow, slowly = flat(rank), flat(rank, size=1e-30)
            orthogonalize_(slow, LENGTHS, rank)
            scale_(slowly, LENGTHS, rank)
        torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
        assert torch.equal(scaled, slowly)


@EITHER
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-7, 1.0, 1e4])
def test_scaling_is_by_powers_of_two_and_leaves_zeros(dtype: torch.dtype, size: float) -> None:
    q = flat(2, dtype, size)
    q[: 2 * LENGTHS[0]] = 0
    before = q.clone()
    scale_(q, LENGTHS, 2)
    for rows, given in zip(by_matrix(q, 2), by_matrix(before, 2), strict=True):
        for row, old in zip(rows, given, strict=True):
            if not bool(old.any()):
                assert not bool(row.any())
                continue
            assert 0.5 <= float(row.abs().amax()) < 1
            factor = math.log2(float(row.abs().amax()) / float(old.abs().amax()))
            assert factor == round(factor)
            assert torch.equal(row.double(), old.double() * 2.0**factor)
