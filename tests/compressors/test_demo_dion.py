"""DeMo and Dion: the arithmetic of their authors' code on plain tensors, and training with them."""

import math

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor

from tacit.algorithms import parse
from tacit.compressors import DCT, Dense, Dion, ErrorFeedback, Sign, SignOfMean, ThreeLC, TopK
from tacit.contracts import Matrix
from tacit.errors import ConfigError

LENGTH, ROWS, P = 8, 6, 3


def cosines(length: int) -> Tensor:
    """The orthonormal DCT-II, entry by entry."""
    return torch.tensor(
        [
            [
                math.sqrt((1 if k == 0 else 2) / length) * math.cos(math.pi * (2 * n + 1) * k / (2 * length))
                for n in range(length)
            ]
            for k in range(length)
        ],
        dtype=torch.float64,
    )


def test_demo_takes_the_steps_of_its_authors_code() -> None:
    """delta <- decay delta + lr g; the largest coefficients leave it; the step is the sign of their sum."""
    codec = DCT(TopK(ratio=4 / 16, chunk=16), length=LENGTH)
    group = Peers(SignOfMean(ErrorFeedback(codec, decay=0.9)), P, LENGTH * ROWS)
    basis = cosines(LENGTH)
    delta = torch.zeros(P, LENGTH * ROWS, dtype=torch.float64)
    for seed in range(6):
        xs = tensors(P, LENGTH * ROWS, seed)
        outcomes = group.exchange(xs)
        delta = 0.9 * delta + torch.stack(xs).double()
        coefficients = (delta.view(P, ROWS, LENGTH) @ basis.T).view(P, -1, 16)
        at = coefficients.abs().topk(4, dim=2).indices
        sent = torch.zeros_like(coefficients).scatter(2, at, coefficients.gather(2, at))
        arrived = (sent.view(P, ROWS, LENGTH) @ basis).view(P, -1)
        delta = delta - arrived
        mean = arrived.mean(0)
        clear = mean.abs() > 1e-4
        assert torch.equal(outcomes[0].mean.double()[clear], mean.sign()[clear])
        for rank in range(P):
            kept = outcomes[rank].state["inner.residual"].double()
            torch.testing.assert_close(kept, delta[rank], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numel", [1, 63, 64, 200, 1000])
def test_a_transform_of_any_length_comes_back(numel: int) -> None:
    x = tensors(1, numel)[0]
    mean = Peers(DCT(TopK(ratio=1.0)), 1, numel).exchange([x])[0].mean
    torch.testing.assert_close(mean, x, rtol=1e-4, atol=1e-4)


def test_a_wave_travels_in_one_coefficient() -> None:
    x = cosines(64)[5].float().repeat(3)
    mean = Peers(DCT(TopK(ratio=3 / 192)), 1, 192).exchange([x])[0].mean
    torch.testing.assert_close(mean, x, rtol=1e-5, atol=1e-5)


def test_dion_takes_the_steps_of_its_authors_code() -> None:
    """M <- M + G; P <- qr(mean(M Q)); R <- mean(M' P); M <- M - (1 - mu) P R'; Q <- R by columns, normed."""
    rows, columns, rank, mu = 12, 20, 4, 0.9
    codec = Dion(rank=rank, momentum=mu, matrices=(Matrix(0, rows, columns),))
    group = Peers(ErrorFeedback(codec, rescale=False), P, rows * columns)
    m = torch.zeros(P, rows, columns, dtype=torch.float64)
    q = group.states[0]["inner.q"].double().view(rank, columns).T
    for seed in range(6):
        xs = tensors(P, rows * columns, seed)
        outcomes = group.exchange(xs)
        m = m + torch.stack(xs).double().view(P, rows, columns)
        p = torch.linalg.qr((m @ q).mean(0)).Q
        r = (m.transpose(1, 2) @ p).mean(0)
        m = m - (1 - mu) * p @ r.T
        q = r / r.norm(dim=0)
        step = math.sqrt(rows / columns) * p @ q.T
        torch.testing.assert_close(outcomes[1].mean.double().view(rows, columns), step, rtol=0, atol=2e-4)
        for each, kept in zip(outcomes, m, strict=True):
            found = each.state["residual"].double().view(rows, columns)
            torch.testing.assert_close(found, kept, rtol=1e-3, atol=1e-3)


def test_a_step_of_dion_has_the_same_size_in_every_direction_and_survives_zeros() -> None:
    codec = Dion(rank=3, matrices=(Matrix(0, 10, 10), Matrix(120, 5, 8)))
    group = Peers(ErrorFeedback(codec, rescale=False), 2, 160)
    zeros = [torch.zeros(160) for _ in range(2)]
    for _ in range(2):
        assert not group.exchange([x.clone() for x in zeros])[0].mean.any()
    mean = group.exchange(tensors(2, 160))[0].mean
    sizes = torch.linalg.svdvals(mean[:100].view(10, 10))
    assert float(sizes[:3].max()) < 3
    assert float(sizes[3:].max()) < 1e-5
    assert not mean[100:120].any()


@pytest.mark.parametrize(("text", "lr"), [("demo:chunk=16,k=4,decay=0.9", 0.1), ("dion:rank=4", 0.1)])
def test_a_network_learns_by_it(text: str, lr: float) -> None:
    """Two ranks, each with half of the data of a linear task: the loss falls to a twentieth."""
    (level,) = parse(text).levels
    generator = torch.Generator().manual_seed(0)
    data, truth = torch.randn(64, 16, generator=generator), torch.randn(16, 16, generator=generator)
    wanted, w = data @ truth, torch.zeros(16, 16)
    group = Peers(level.compressor.with_layout((Matrix(0, 16, 16),)), 2, 256)

    def loss() -> float:
        return float((data @ w - wanted).square().mean())

    first = loss()
    for step in range(300):
        halves = (slice(0, 32), slice(32, 64))
        gradients = [(data[half].T @ (data[half] @ w - wanted[half]) / 32).view(-1) for half in halves]
        w -= lr * (1 - step / 300) * group.exchange(gradients)[0].mean.view(16, 16)
    assert loss() < first / 20


def test_what_cannot_be_is_refused() -> None:
    for make, says in (
        (lambda: DCT(length=1), "length=1 is not a whole number, from 2 to 4096"),
        (lambda: DCT(ThreeLC()), "cannot encode coefficients: write a one-shot compressor of fixed length"),
        (lambda: DCT(ErrorFeedback(TopK())), "cannot encode coefficients"),
        (lambda: Dion(momentum=1.0), r"momentum=1.0 is not in \[0, 1\)"),
        (lambda: parse("demo:k=5000"), "k=5000 is not a whole number, from 1 to 4096"),
    ):
        with pytest.raises(ConfigError, match=says):
            make()


def test_signs_are_of_all_that_is_exempt_too() -> None:
    assert SignOfMean(ErrorFeedback(Sign())).exempted() == SignOfMean(Dense())
