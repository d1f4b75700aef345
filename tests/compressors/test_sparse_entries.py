"""Some entries: what top-k, threshold and their ways of writing do beyond the laws."""

import math

import pytest
import torch
from laws import Bench, Peers, tensors
from torch import Tensor

from tacit import algorithms
from tacit.compressors import BF16, Dense, ErrorFeedback, PowerSGD, Sign, Threshold, TopK
from tacit.contracts import Context, OneShot
from tacit.errors import ConfigError

N = 1000


def once(compressor: object, x: Tensor) -> Tensor:
    return Peers(compressor, 1, x.numel()).exchange([x])[0].mean  # type: ignore[arg-type]


def test_signs_of_a_topk_have_the_mean_of_the_chosen_magnitudes() -> None:
    x = tensors(1, N)[0]
    chosen = x.abs().topk(10).indices
    expected = torch.zeros(N)
    expected[chosen] = x[chosen].sign() * x[chosen].abs().mean()
    torch.testing.assert_close(once(TopK(ratio=0.01, values=Sign()), x), expected)


def test_values_may_be_written_shorter() -> None:
    x = tensors(1, N)[0]
    expected = torch.where(once(TopK(ratio=0.01), x) != 0, x.bfloat16().float(), 0.0)
    assert torch.equal(once(TopK(ratio=0.01, values=BF16()), x), expected)


@pytest.mark.parametrize("values", [BF16(), Sign()])
def test_what_rounding_takes_is_owed(values: object) -> None:
    x = tensors(1, N)[0]
    group = Peers(ErrorFeedback(TopK(ratio=0.01, values=values)), 1, N)  # type: ignore[arg-type]
    mean = group.exchange([x.clone()])[0].mean
    torch.testing.assert_close(mean + group.states[0]["residual"], x)
    assert int((mean != 0).sum()) == 10


@pytest.mark.parametrize("values", [Dense(), Sign()])
def test_any_number_of_peers_is_averaged_in_their_order(values: OneShot) -> None:
    compressor = TopK(ratio=0.05, values=values)
    ctx = [Context(out=torch.empty(N), work=Bench(), peers=19) for _ in range(19)]
    payloads = [compressor.encode(x, ctx[i]) for i, x in enumerate(tensors(19, N))]
    mean, expected = torch.full((N,), math.nan), torch.zeros(N)
    compressor.decode_mean_(payloads, mean)
    for payload in payloads:
        compressor.decode_add_(payload, expected, 1 / 19)
    assert torch.equal(mean, expected)


def test_the_fused_pass_owes_what_the_two_steps_owe() -> None:
    for compressor in (TopK(ratio=0.05), Threshold(tau=2.0), TopK(ratio=0.05, values=Sign())):
        x, residual = tensors(2, N)
        new_residual = torch.empty(N)
        ctx = Context(out=torch.empty(N), work=Bench(), peers=1)
        fused = compressor.encode(x, ctx, residual, new_residual)
        a = x + residual
        payload = compressor.encode(a, ctx)
        assert all(torch.equal(p, q) for p, q in zip(fused, payload, strict=True))
        compressor.sent(payload, a).subtract_from_(a)
        assert torch.equal(new_residual, a)


@pytest.mark.parametrize(
    ("numel", "chunk", "sent"),
    [(1000, 100, 50), (1000, 1000, 50), (1000, 300, 15 * 3 + 15), (1000, 333, 17 * 3 + 1), (40, 1000, 40)],
)
def test_of_each_chunk_the_largest_are_sent(numel: int, chunk: int, sent: int) -> None:
    compressor = TopK(ratio=0.05, chunk=chunk)
    assert compressor.most(numel) == sent
    x = tensors(1, numel)[0]
    expected = torch.zeros(numel)
    for start in range(0, numel, chunk):
        piece = x[start : start + chunk]
        at = piece.abs().topk(min(math.ceil(round(0.05 * chunk, 6)), piece.numel())).indices
        expected[start : start + chunk][at] = piece[at]
    assert torch.equal(once(compressor, x), expected)


def test_a_choice_among_as_many_as_there_are_is_one_among_all() -> None:
    xs = tensors(3, N)
    whole, of_one = (Peers(ErrorFeedback(TopK(ratio=0.01, chunk=chunk)), 3, N) for chunk in (None, N))
    for _ in range(3):
        assert torch.equal(whole.exchange(xs)[0].mean, of_one.exchange(xs)[0].mean)


def test_sums_of_what_was_chosen_by_chunks_are_said_in_full() -> None:
    sums = TopK(ratio=0.01, chunk=100).of_sums(N, 4)
    assert sums == TopK(ratio=0.04)
    x = sum(once(TopK(ratio=0.01, chunk=100), x) for x in tensors(4, N))
    assert isinstance(x, Tensor)
    assert torch.equal(once(sums, x), x)


def test_chunks_have_a_text_form() -> None:
    strategy = algorithms.parse("topk:ratio=0.015625,chunk=4096")
    assert strategy.compressor == ErrorFeedback(TopK(ratio=0.015625, chunk=4096))
    assert algorithms.parse("topk").compressor == ErrorFeedback(TopK())


@pytest.mark.parametrize("chunk", [0, -1, 2.0, True])
def test_a_chunk_that_is_none_is_refused(chunk: object) -> None:
    with pytest.raises(ConfigError, match=r"chunk=.* is not a whole number, 1 or more: .*4096"):
        TopK(chunk=chunk)  # type: ignore[arg-type]


def test_a_threshold_sends_plus_or_minus_tau_and_keeps_the_rest() -> None:
    x = torch.tensor([0.5, -0.5, 0.49, -3.0, 0.0, 1.2])
    group = Peers(ErrorFeedback(Threshold(tau=0.5, capacity=1.0)), 1, 6)
    assert group.exchange([x])[0].mean.tolist() == [0.5, -0.5, 0.0, -0.5, 0.0, 0.5]
    rest = torch.tensor([0.0, 0.0, 0.49, -2.5, 0.0, 0.7])
    torch.testing.assert_close(group.states[0]["residual"], rest)


def test_beyond_its_capacity_a_threshold_sends_the_largest() -> None:
    x = torch.tensor([3.0, -4.0, 2.0, 5.0, 1.0, 1.0])
    group = Peers(ErrorFeedback(Threshold(tau=1.0, capacity=0.5)), 1, 6)
    assert group.exchange([x])[0].mean.tolist() == [1.0, -1.0, 0.0, 1.0, 0.0, 0.0]
    assert group.exchange([torch.zeros(6)])[0].mean.tolist() == [1.0, -1.0, 0.0, 1.0, 0.0, 0.0]
    assert group.states[0]["residual"].tolist() == [1.0, -2.0, 2.0, 3.0, 1.0, 1.0]


@pytest.mark.parametrize("x", [torch.zeros(N), torch.full((N,), -2.0), torch.full((N,), 2.0**-149)])
def test_zeros_equals_and_denormals(x: Tensor) -> None:
    group = Peers(ErrorFeedback(TopK(ratio=0.01)), 1, N)
    mean = group.exchange([x.clone()])[0].mean
    assert torch.equal(mean[:10], x[:10])
    assert not bool(mean[10:].any())
    assert torch.equal(
        once(Threshold(tau=1.0), x), torch.where(torch.arange(N) < 10, x, 0.0).clamp(-1, 1).round()
    )


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan])
def test_a_threshold_that_is_none_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match="is not a finite number above 0"):
        Threshold(tau=tau)


def test_a_capacity_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"capacity=0 is not in \(0, 1\]"):
        Threshold(tau=1.0, capacity=0)


@pytest.mark.parametrize("values", [PowerSGD(rank=1), ErrorFeedback(Dense()), "bf16"])
def test_values_that_cannot_be_written_are_refused(values: object) -> None:
    with pytest.raises(ConfigError, match=r"cannot encode entries.*BF16"):
        TopK(values=values)  # type: ignore[arg-type]
