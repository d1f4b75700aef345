"""What PowerSGD does with many matrices: together where they lie at equal distances, and in any size."""

from collections.abc import Sequence

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tacit.compressors import ErrorFeedback, PowerSGD
from tacit.contracts import Context, Matrix
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
