"""Products with thin factors, on the host: what is added, multiplied and subtracted in few passes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tacit.kernels import products
from tacit.kernels.numba.products import BLOCK

pytest.importorskip("numba")

SHAPES = ((1, 1), (3, 5), (7, 16), (5, 33), (2, BLOCK), (4, BLOCK + 17))
GAP = 3
"""Entries before each matrix, so that rows do not lie aligned."""
LINE = 16
"""Entries of a cache line: where all rows begin at one, they are written past the caches."""
RANKS = pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 8])


class Made:
    """Matrices in a flat tensor, with gaps, and their factors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.places: list[products.Place] = []
        at = 0
        for rows, columns in SHAPES:
            self.places.append((at + GAP, rows, columns))
            at += GAP + rows * columns
        generator = torch.Generator().manual_seed(rank)
        self.x, self.residual = (torch.randn(at, generator=generator) for _ in range(2))
        self.p = torch.randn(rank * sum(rows for rows, _ in SHAPES), generator=generator)
        self.q, self.own = (
            torch.randn(rank * sum(columns for _, columns in SHAPES), generator=generator) for _ in range(2)
        )

    def parts(self, *flats: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Matrix by matrix: of each flat the matrix, or P' (rank, rows), or Q' (rank, columns), in fp64."""
        at_p = at_q = 0
        for start, rows, columns in self.places:
            found = []
            for flat in flats:
                if flat.numel() == self.x.numel():
                    part = flat[start : start + rows * columns].view(rows, columns)
                elif flat.numel() == self.p.numel():
                    part = flat[at_p : at_p + self.rank * rows].view(self.rank, rows)
                else:
                    part = flat[at_q : at_q + self.rank * columns].view(self.rank, columns)
                found.append(part.double())
            yield tuple(found)
            at_p, at_q = at_p + self.rank * rows, at_q + self.rank * columns

    def gaps(self, flat: Tensor) -> Tensor:
        return torch.cat([flat[start - GAP : start] for start, _, _ in self.places])


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-5)


@RANKS
@pytest.mark.parametrize("adds", [False, True])
def test_p_is_of_the_sum_and_the_sum_is_kept(rank: int, adds: bool) -> None:
    made, total = Made(rank), torch.full_like(Made(rank).x, 7.0)
    before = made.x.clone()
    added = (made.residual, total) if adds else (None, None)
    assert products.times_q_(made.x, made.p, made.q, made.places, rank, *added)
    given = made.x + made.residual if adds else made.x
    for matrix, p, q in made.parts(given, made.p, made.q):
        close(p, (matrix @ q.t()).t())
    assert torch.equal(made.x, before)
    if adds:
        assert all(torch.equal(mine, wanted) for mine, wanted in made.parts(total, given))
    assert bool((made.gaps(total) == 7.0).all())


@RANKS
def test_q_is_of_the_transpose(rank: int) -> None:
    made = Made(rank)
    assert products.times_p_(made.x, made.p, made.q, made.places, rank)
    for matrix, p, q in made.parts(made.x, made.p, made.q):
        close(q, p @ matrix)


@RANKS
def test_the_mean_is_written_and_the_own_part_is_taken_from_the_rest(rank: int) -> None:
    made = Made(rank)
    out, rest = torch.full_like(made.x, 7.0), made.x.clone()
    assert products.expand_and_subtract_(out, rest, made.p, made.q, made.own, made.places, rank)
    for mean, left, given, p, q, own in made.parts(out, rest, made.x, made.p, made.q, made.own):
        close(mean, p.t() @ q)
        close(left, given - p.t() @ own)
    assert bool((made.gaps(out) == 7.0).all())
    assert torch.equal(made.gaps(rest), made.gaps(made.x))


@RANKS
@pytest.mark.parametrize("subtract", [False, True])
def test_each_of_the_two_is_there_alone_too(rank: int, subtract: bool) -> None:
    made = Made(rank)
    out = made.x.clone()
    assert products.expand_(out, made.p, made.q, made.places, rank, subtract)
    for found, given, p, q in made.parts(out, made.x, made.p, made.q):
        close(found, given - p.t() @ q if subtract else p.t() @ q)


@pytest.mark.parametrize("rank", [1, 4, 5])
def test_rows_that_begin_at_cache_lines_are_as_others(rank: int) -> None:
    rows, columns = 5, BLOCK + 2 * LINE
    generator = torch.Generator().manual_seed(rank)
    # A cache line longer than is needed: somewhere at the front one begins.
    x, residual, total, out = (torch.randn(rows * columns + LINE, generator=generator) for _ in range(4))
    x, residual, total, out = (
        each[-each.data_ptr() // 4 % LINE :][: rows * columns] for each in (x, residual, total, out)
    )
    assert not (total.data_ptr() | out.data_ptr()) % (4 * LINE)
    p, (q, own) = torch.empty(rank * rows), torch.randn(2, rank * columns, generator=generator)
    places = [(0, rows, columns)]
    assert products.times_q_(x, p, q, places, rank, residual, total)
    assert torch.equal(total, x + residual)
    close(p.view(rank, rows).t(), total.view(rows, columns) @ q.view(rank, columns).t())
    assert products.expand_and_subtract_(out, total, p, q, own, places, rank)
    bases = p.view(rank, rows).t()
    close(out.view(rows, columns), bases @ q.view(rank, columns))
    close(total.view(rows, columns), (x + residual).view(rows, columns) - bases @ own.view(rank, columns))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_passed_on(bad: float) -> None:
    made = Made(2)
    made.residual[made.places[3][0] + 40] = bad
    total = torch.empty_like(made.x)
    assert products.times_q_(made.x, made.p, made.q, made.places, 2, made.residual, total)
    finite = [bool(p.isfinite().all()) for (p,) in made.parts(made.p)]
    assert finite == [True, True, True, False, True, True]


def test_other_types_are_left_to_torch() -> None:
    made = Made(1)
    x, p, q = made.x.double(), made.p.double(), made.q.double()
    assert not products.times_q_(x, p, q, made.places, 1)
    assert not products.times_q_(x, p, q, made.places, 1, x.clone(), x.clone())
    assert not products.times_p_(x, p, q, made.places, 1)
    assert not products.expand_(x, p, q, made.places, 1)
    assert not products.expand_and_subtract_(x, x.clone(), p, q, q, made.places, 1)
