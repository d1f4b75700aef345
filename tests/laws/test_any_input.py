"""The laws again, for whatever hypothesis finds: any finite values, any length, every type of gradient."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st
from laws import Bench, Peers
from table import TABLE, Row
from torch import Tensor

from cases import for_each
from tacit.compressors import (
    Cascade,
    Partition,
    PowerSGD,
    RandomK,
    SampledSpectrum,
    Scheduled,
    SignOfMean,
    TernGrad,
)
from tacit.contracts import Compressor, Context, Matrix
from tacit.errors import Overflow
from tacit.prediction import Predicted

PEERS, GUARD = 2, 64
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ANY = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

KINDS = ("normal", "zeros", "minus zero", "equal", "denormal", "least", "large", "huge", "largest", "a spike")


def rows() -> dict[str, Row]:
    """Those whose parts are not tied to a length."""
    return {name: row for name, row in TABLE.items() if not isinstance(row.compressor, Partition)}


def for_length(compressor: Compressor, numel: int) -> Compressor:
    """The same, with matrices that fit: the largest square, and behind it nothing."""
    side = int(numel**0.5)
    return compressor.with_layout((Matrix(0, side, side),) if side else ())


@functools.cache
def tensor(kind: str, numel: int, dtype: torch.dtype, number: int) -> Tensor:
    """Finite entries of this kind; not to be changed."""
    limits = torch.finfo(dtype)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    match kind:
        case "zeros":
            x.zero_()
        case "minus zero":
            x = -torch.zeros_like(x)
        case "equal":
            x.fill_(-0.3 if number % 2 else 0.3)
        case "denormal":
            x *= limits.smallest_normal / 8
        case "least":
            x = x.sign() * limits.smallest_normal * limits.eps
        case "large":
            x *= limits.max**0.5
        case "huge":
            x *= limits.max / 8
        case "largest":
            x = x.sign() * limits.max
        case "a spike":
            x[: numel // 2 + 1] *= 1e-6
            x[:1] = limits.max / 2
    return x.clamp(limits.min, limits.max).to(dtype)


class Guarded(Bench):
    """Buffers between guards, which nobody may write to."""

    def __init__(self) -> None:
        self.walls: list[Tensor] = []

    def between(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        numel = functools.reduce(int.__mul__, shape, 1)
        whole = torch.full((numel + 2 * GUARD,), 77, dtype=dtype)
        self.walls += [whole[:GUARD], whole[-GUARD:]]
        return whole[GUARD:-GUARD].view(tuple(shape))

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self.between(like.shape, like.dtype)

    def scratch(self, key: str, like: Tensor, shape: object, dtype: torch.dtype) -> Tensor:
        return self.between(tuple(shape), dtype)  # type: ignore[call-overload]

    @property
    def whole(self) -> bool:
        """Whether nobody has written to the guards that there are by now."""
        kinds = {wall.dtype for wall in self.walls}
        return all(
            bool((torch.cat([wall for wall in self.walls if wall.dtype == kind]) == 77).all())
            for kind in kinds
        )


class GuardedPeers(Peers):
    """`Peers` of any type, whose buffers, inputs and outputs lie between guards."""

    def __init__(self, compressor: Compressor, numel: int, dtype: torch.dtype) -> None:
        super().__init__(compressor, PEERS, numel)
        self.states = [compressor.init(torch.empty(numel, dtype=dtype)) for _ in range(PEERS)]
        self.work = Guarded()

    def _context(self, rank: int, out: Tensor) -> Context:
        inside = self.work.between(out.shape, out.dtype)
        return dataclasses.replace(super()._context(rank, out), work=self.work, out=inside)


def inputs(examples: bool = True):  # type: ignore[no-untyped-def]
    """A length, a type, and a kind for each rank; what has gone wrong before is always among them."""

    def decorate(test):  # type: ignore[no-untyped-def]
        lengths = st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 1000, 1025]))
        kinds = st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS))
        test = given(numel=lengths, dtype=st.sampled_from(FLOATS), kinds=kinds)(test)
        for dtype in FLOATS if examples else ():
            for kind in ("huge", "largest", "denormal", "zeros"):
                test = example(numel=600, dtype=dtype, kinds=(kind, kind))(test)
        test = example(numel=1, dtype=torch.float32, kinds=("zeros", "normal"))(test)
        return seed(0)(ANY(test))

    return decorate


@pytest.mark.parametrize("name", rows())  # not the row: hypothesis writes out what it is given
@inputs()
def test_ranks_agree_and_finite_entries_stay_finite(
    name: str, numel: int, dtype: torch.dtype, kinds: tuple[str, str]
) -> None:
    compressor = for_length(TABLE[name].compressor, numel)
    group = GuardedPeers(compressor, numel, dtype)
    for number in range(2):
        xs = [tensor(kind, numel, dtype, number + rank) for rank, kind in enumerate(kinds)]
        before = [x.clone() for x in xs]
        try:
            first, second = group.exchange(xs)
        except Overflow:
            return  # it says so
        assert all(torch.equal(x, old) for x, old in zip(xs, before, strict=True))
        assert group.work.whole
        if not bool(first.mean.isfinite().all()):
            # The session looks at these means, and says so on every rank.
            assert not compressor.hides_nonfinite or dtype.itemsize < 4
            return
        assert torch.equal(first.mean, second.mean)
        for outcome in (first, second):
            assert all(bool(kept.isfinite().all()) for kept in outcome.state.values())


def tame(compressor: Compressor) -> bool:
    """Whether what was sent can be compared with the mean to a known precision, at any length."""
    rough = (PowerSGD, Predicted, RandomK, Cascade, SampledSpectrum, Scheduled, SignOfMean, TernGrad)
    inner = getattr(compressor, "inner", None)
    return not isinstance(compressor, rough) and (inner is None or tame(inner))


@pytest.mark.parametrize("name", [name for name, row in rows().items() if tame(row.compressor)])
@inputs(examples=False)
def test_the_mean_is_of_what_was_sent_and_the_rest_is_owed(
    name: str, numel: int, dtype: torch.dtype, kinds: tuple[str, str]
) -> None:
    row = TABLE[name]
    if {"huge", "largest", "a spike", "large"} & {*kinds} or dtype.itemsize < 4:
        kinds, dtype = ("normal", "equal"), torch.float32 if dtype.itemsize < 8 else dtype
    group = GuardedPeers(row.compressor, numel, dtype)
    given_, arrived = torch.zeros(2, numel).double(), torch.zeros(2, numel).double()
    for number in range(3):
        xs = [tensor(kind, numel, dtype, number + rank) for rank, kind in enumerate(kinds)]
        outcomes = group.exchange(xs)
        sent = torch.stack([outcome.sent.dense(outcome.mean) for outcome in outcomes]).double()
        expected = sent.sum(0).sign() if row.votes else sent.mean(0)
        size = max(float(sent.abs().max()), 1e-30)
        assert float((outcomes[0].mean.double() - expected).abs().max()) <= (row.rounding + 1e-6) * size
        given_ += torch.stack(xs).double()
        arrived += sent
    if row.conserves:
        (field,) = {each for each in group.states[0] if each.removeprefix("inner.") == "residual"}
        new_residual = torch.stack([state[field] for state in group.states]).double()
        torch.testing.assert_close(arrived + new_residual, given_, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE.keys())
@for_each("dtype", FLOATS)
def test_rows_of_the_table_take_every_type(row: Row, dtype: torch.dtype) -> None:
    group = GuardedPeers(row.compressor, 1000, dtype)
    for number in range(2):
        xs = [tensor("normal", 1000, dtype, number + rank) for rank in range(PEERS)]
        first, second = group.exchange(xs)
        assert first.mean.dtype == dtype
        assert torch.equal(first.mean, second.mean)
        assert bool(first.mean.isfinite().all())
        assert group.work.whole


def test_what_cannot_be_sent_or_owed_names_the_lot() -> None:
    from tacit.compressors import ErrorFeedback, Sign

    x = torch.full((100,), torch.finfo(torch.float32).max)
    group = Peers(ErrorFeedback(Sign()), 1, 100)
    group.states = [{"residual": x.clone()}]
    with pytest.raises(Overflow, match=r"in the bucket of lot, in step 0, .* beyond 3.4e\+38.*Clip"):
        group.exchange([x])
    assert torch.equal(group.states[0]["residual"], x)
