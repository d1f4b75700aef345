"""When replicas leap, how far, and what stays where it is."""

from typing import Any

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor, nn

from tacit import algorithms
from tacit.compressors import Dense, ErrorFeedback, TopK
from tacit.contracts import Compressor, Matrix
from tacit.errors import ConfigError
from tacit.prediction import Nowcast
from tacit.prediction.extrapolation import Linear
from tacit.prediction.networks.wnn import WNN
from tacit.prediction.predictor import Predictor, Seen
from tacit.replicas.rounds_after_step import OptimizerHook
from tacit.session import Session
from tacit.session.buckets import fitting, group_names
from tacit.transports.loopback import Loopback, LoopbackTransport

N = 60
MATRICES = (Matrix(0, 6, 10),)


class Asked(Linear):
    """The mean change of a period; keeps what it was shown."""

    shown: list[Tensor] = []  # noqa: RUF012

    def change(self, seen: Seen, kind: str) -> Tensor:
        self.shown.append(seen.changes.clone())
        return super().change(seen, kind)


@pytest.mark.parametrize("period", [1, 3])
def test_all_leap_five_periods_ahead_after_every_fifth(period: int) -> None:
    Asked.shown.clear()
    peers = Peers(Nowcast(Dense(), Asked(), period, MATRICES), 2, N)
    changes, leaps = [], []
    for number in range(12 * period):
        xs = tensors(2, N, seed=number)
        mean = torch.stack(xs).mean(0)
        changes.append(mean)
        leaps.append(peers.exchange(xs)[0].mean - mean)
    ends = [i for i, leap in enumerate(leaps) if float(leap.abs().max()) > 1e-3]
    assert ends == [5 * period - 1, 10 * period - 1]
    for end, shown in zip(ends, Asked.shown[::2], strict=True):
        periods = torch.stack(changes[: end + 1]).unflatten(0, (-1, period)).sum(1)
        torch.testing.assert_close(shown, periods[-4:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(leaps[end], 5 * periods[-2:].mean(0), rtol=1e-4, atol=1e-4)


def test_it_remembers_four_periods_and_nothing_else() -> None:
    state = Nowcast(Dense(), WNN(), 20, MATRICES).init(torch.empty(N))
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
        f"past{i}": (N,) for i in range(4)
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_two_bytes_what_has_moved_in_a_long_period_is_all_there(dtype: torch.dtype) -> None:
    peers = Peers(Nowcast(Dense(), Linear(), 300, MATRICES), 1, N, dtype=dtype)
    small = torch.linspace(0.001, 0.01, N).to(dtype)
    for count in range(1, 301):
        (outcome,) = peers.exchange([small.clone()])
        assert outcome.mean.dtype == dtype
        if count % 100 == 0:
            torch.testing.assert_close(peers.states[0]["past0"], count * small.float(), rtol=1e-5, atol=0)


def test_in_two_bytes_all_leap_five_periods_ahead() -> None:
    dtype = torch.bfloat16
    peers = Peers(Nowcast(Dense(), Linear(), 50, MATRICES), 1, N, dtype=dtype)
    small = torch.linspace(0.001, 0.01, N).to(dtype)
    means = [peers.exchange([small.clone()])[0].mean for _ in range(250)]
    torch.testing.assert_close(means[-1].float(), (1 + 5 * 50) * small.float(), rtol=1e-2, atol=0)


def test_what_is_no_predictor_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no Predictor: write WNN"):
        Nowcast(Dense(), "wnn")  # type: ignore[arg-type]


def test_vectors_are_left_to_the_one_inside() -> None:
    vector, matrix = torch.Size((5,)), torch.Size((5, 5))
    plain = Nowcast(Dense(), Linear())
    assert plain.exempts(vector)
    assert not plain.exempts(matrix)
    assert plain.exempted() == Dense()
    sparse: Compressor = ErrorFeedback(TopK(ratio=0.1))
    assert Nowcast(sparse, Linear()).exempted() == sparse.exempted()


def moved(compressor: Compressor, rounds: int) -> dict[str, Tensor]:
    """Where a network with batch norm is after rounds of progress that is the same in each."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    named: dict[str, Tensor] = {name: p.detach() for name, p in network.named_parameters()}
    named |= {name: b for name, b in network.named_buffers() if b.is_floating_point()}
    (level,) = algorithms.parse("wnn:period=1").levels
    options: dict[str, Any] = {"policy": fitting(compressor, named)}
    session = Session(
        level, named, LoopbackTransport(Loopback(1), 0), group_names(named, named, 1 << 20), **options
    )
    door = OptimizerHook(session, named)
    for _ in range(rounds):
        for name, p in named.items():
            # Towards 0, as a running variance goes that was too large; never below it.
            p.mul_(0.8) if "running_var" in name else p.add_(0.01)
        door.after_step()
    session.close()
    return {name: p.clone() for name, p in named.items()}


class Far(Predictor):
    """On and on."""

    def change(self, seen: Seen, kind: str) -> Tensor:
        return seen.changes[-1]


def test_statistics_of_batch_norm_do_not_leap() -> None:
    plain, leapt = moved(Dense(), 5), moved(Nowcast(Dense(), Far(), 1), 5)
    for name, p in plain.items():
        if p.dim() < 2:
            assert torch.equal(leapt[name], p), name
        else:
            torch.testing.assert_close(leapt[name], p + 5 * 0.01)
    assert bool((leapt["1.running_var"] > 0).all())
