"""What PowerSGD does with many matrices: together where they lie at equal distances, and in any size."""

from collections.abc import Sequence

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tacit.compressors import ErrorFeedback, PowerSGD, QuantizedPowerSGD
from tacit.contracts import Context, Matrix
from tacit.kernels.levels import BY_LARGEST
from tacit.kernels.orthogonal import scale_
from tacit.kernels.payload_layout import bucket_count, code_bytes
from tacit.kernels.reference import levels as reference
from tacit.topologies import Flat
from tacit.transports.loopback import Loopback


def placed(*matrices: tuple[int, int, int]) -> tuple[Matrix, ...]:
    return tuple(Matrix(*each) for each in matrices)


EVEN = placed((0, 12, 20), (240, 20, 12), (500, 12, 20), (740, 20, 12), (1000, 12, 20), (1240, 20, 12))
UNEVEN = placed((0, 12, 20), (240, 20, 12), (481, 12, 20), (800, 12, 20), (1040, 8, 8), (1240, 12, 20))


def test_matrices_at_equal_distances_go_together() -> None:
    assert [each.count for each in PowerSGD(matrices=EVEN)._batches] == [3, 3]
    assert sorted(each.count for each in PowerSGD(matrices=UNEVEN)._batches) == [1, 1, 2, 2]


@pytest.mark.parametrize("matrices", [EVEN, UNEVEN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_together_is_as_each_alone(matrices: Sequence[Matrix], dtype: torch.dtype) -> None:
    xs = [x.to(dtype) for x in tensors(2, 1500)]
    together = Peers(PowerSGD(rank=3, matrices=tuple(matrices)), 2, 1500)
    together.states = [{"q": state["q"].to(dtype)} for state in together.states]
    q = together.states[0]["q"]
    mean = together.exchange(xs)[0].mean
    at, covered = 0, torch.zeros(1500, dtype=torch.bool)
    for m in matrices:
        stretch = slice(m.start, m.start + m.rows * m.columns)
        mine = q[at : (at := at + 3 * m.columns)]
        alone = Peers(PowerSGD(rank=3, matrices=(Matrix(0, m.rows, m.columns),)), 2, m.rows * m.columns)
        alone.states = [{"q": mine.clone()}] * 2
        expected = alone.exchange([x[stretch].clone() for x in xs])[0].mean
        torch.testing.assert_close(mean[stretch], expected, rtol=1e-4, atol=1e-4)
        covered[stretch] = True
    assert not bool(mean[~covered].any())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e15, 1e30])
def test_gradients_of_any_size_are_sent(size: float) -> None:
    """Q is as large as the gradient: M Q is not to overflow with it, nor to vanish."""
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(12, 2, generator=generator) @ torch.randn(2, 20, generator=generator)).view(-1)
    group = Peers(PowerSGD(rank=2, matrices=placed((0, 12, 20))), 2, 240)
    for _ in range(4):
        mean = group.exchange([x * size, x * size])[0].mean
    torch.testing.assert_close(mean / size, x, rtol=1e-3, atol=1e-3)


def test_the_scale_of_q_costs_no_bits() -> None:
    xs = tensors(2, 1500)
    plain, scaled = (Peers(PowerSGD(rank=2, matrices=EVEN), 2, 1500) for _ in range(2))
    scaled.states = [{"q": state["q"] * 2.0**20} for state in scaled.states]
    assert torch.equal(plain.exchange(xs)[0].mean, scaled.exchange(xs)[0].mean)


def levels(x: Tensor, part: str, rank: int, round_: int) -> Tensor:
    """What arrives of a factor in 4 bits."""
    ctx = Context(out=x, work=None, peers=2, rank=rank, round=round_, name="lot")  # type: ignore[arg-type]
    codes = torch.empty(code_bytes(x.numel(), 4), dtype=torch.uint8)
    units, out = torch.empty(bucket_count(x.numel(), 512)), torch.empty_like(x)
    seed = ctx.inside(part).draw("levels", rank)
    reference.quantize(x, 4, 512, BY_LARGEST, seed, codes, units)
    reference.add_levels_([(codes, units)], 4, 512, 1.0, out, fresh=True)
    return out


def test_factors_in_few_bits_are_low_rank_then_levels() -> None:
    """Of rank 1, with the error kept: as DiLoCoX has it, line by line."""
    shapes = ((12, 20), (20, 12), (8, 30))
    matrices = placed((0, 12, 20), (240, 20, 12), (480, 8, 30))
    codec = QuantizedPowerSGD(rank=1, matrices=matrices)
    group = Peers(ErrorFeedback(codec), 2, 720)
    q = group.states[0]["inner.q"].clone()
    e = [torch.zeros(720) for _ in range(2)]
    for round_ in range(4):
        xs = tensors(2, 720, seed=round_)
        a = [x + rest for x, rest in zip(xs, e, strict=True)]
        ms = [[part.view(shape) for part, shape in zip(each.split(240), shapes, strict=True)] for each in a]
        basis = q.clone()
        scale_(basis, [columns for _, columns in shapes], 1)
        qs = basis.split([columns for _, columns in shapes])
        sent = [torch.cat([m @ v for m, v in zip(m_r, qs, strict=True)]) for m_r in ms]
        p = torch.stack([levels(each, "inner.p", r, round_) for r, each in enumerate(sent)]).mean(0)
        ps = [each / each.norm() for each in p.split([rows for rows, _ in shapes])]
        sent = [torch.cat([m.T @ u for m, u in zip(m_r, ps, strict=True)]) for m_r in ms]
        sent = [levels(each, "inner.q", r, round_) for r, each in enumerate(sent)]
        q = torch.stack(sent).mean(0)

        def product(q: Tensor, ps: list[Tensor] = ps) -> Tensor:
            parts = q.split([columns for _, columns in shapes])
            return torch.cat([torch.outer(u, v).view(-1) for u, v in zip(ps, parts, strict=True)])

        e = [each - product(mine) for each, mine in zip(a, sent, strict=True)]
        done = group.exchange(xs)
        for rank in range(2):
            torch.testing.assert_close(done[rank].mean, product(q), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(done[rank].state["residual"], e[rank], rtol=1e-4, atol=1e-4)


class StateSlice:
    """A workspace as a session's: each buffer is made once."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def spare(self, field: str, like: Tensor) -> Tensor:
        return self.buffers.setdefault(field, torch.empty_like(like))

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.buffers.setdefault(key, torch.empty(tuple(shape), dtype=dtype))


def test_nothing_large_is_allocated_once_buffers_are_there() -> None:
    shape, distance = (400, 300), 400 * 300 + 100
    matrices = tuple(Matrix(i * distance, *shape) for i in range(4))
    x = torch.randn(4 * distance)
    compressor = ErrorFeedback(PowerSGD(rank=4, matrices=matrices))
    state, work = compressor.init(x), StateSlice()

    def step() -> None:
        given = x.clone()
        ctx = Context(out=given, work=work, peers=1, name="bucket")
        Loopback(1).run([Flat().conduct(given, compressor, state, ctx)])

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as told:
        step()
    sizes = [event.cpu_memory_usage for event in told.events() if event.cpu_memory_usage > 0]
    large = [size for size in sizes if size > 1 << 16]
    assert set(large) <= {x.numel() * 4}, large  # the clone above, and that alone
