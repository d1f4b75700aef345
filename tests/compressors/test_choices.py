"""What is chosen, drawn or rounded by compressors of the survey: their papers' lines on plain tensors."""

import math

import pytest
import torch
from laws import Peers, tensors
from torch import Tensor

from tacit.compressors import (
    EF21,
    LAG,
    LAQ,
    AdaComp,
    CountSketch,
    Dense,
    ErrorFeedback,
    LargestChunks,
    MomentumCorrection,
    NaturalDithering,
    OkTopK,
    SampledEntries,
    SampledSpectrum,
    ThreeLC,
    TopK,
)
from tacit.compressors.sampling import drawn, probabilities
from tacit.contracts import AxisRank, Compressor, Context, Matrix
from tacit.errors import ConfigError, PayloadError
from tacit.testing.ranks import FreshBuffers
from tacit.topologies import TwoPhase
from tacit.transports.meter import DryRun, run_dry

N = 400


def context(x: Tensor, round_: int = 0) -> Context:
    return Context(out=torch.empty_like(x), work=FreshBuffers(), peers=1, name="lot", round=round_)


def mean_of_draws(compressor: Compressor, x: Tensor, draws: int) -> Tensor:
    group = Peers(compressor, 1, x.numel())
    return torch.stack([group.exchange([x.clone()])[0].mean.clone() for _ in range(draws)]).double().mean(0)


# ---- 3LC ----------------------------------------------------------------------------------------------


def test_3lc_rounds_to_three_values_and_counts_runs_of_zero_bytes() -> None:
    codec, x = ThreeLC(sparsity=1.5), torch.zeros(200)
    x[0], x[1], x[2] = 2.0, -1.6, 1.4  # M is 3: what is above 1.5 is sent
    payload = codec.encode(x, context(x))
    out = torch.empty_like(x)
    codec.decode_(payload, out)
    assert out[:3].tolist() == [3.0, -3.0, 0.0]
    assert not out[3:].any()
    # 40 bytes, with the entries i, 40 + i, ... in the i-th: two hold a value, 38 are zeros: 14 + 14 + 10.
    message = codec.shortened(payload, 200)
    assert message[4:].tolist() == [122, 120, 255, 255, 243 + 8]
    codes, unit = (torch.empty_like(part) for part in payload)
    codec.restore_(message, 200, (codes, unit))
    assert torch.equal(codes, payload[0])
    assert torch.equal(unit, payload[1])


def test_3lc_has_a_scale_for_each_block() -> None:
    codec, x = ThreeLC(sparsity=1.0), torch.zeros(1100)
    x[3], x[600], x[1099] = 1e-3, -7.0, 2.0
    payload = codec.encode(x, context(x))
    again = tuple(torch.empty_like(part) for part in payload)
    codec.restore_(codec.shortened(payload, 1100), 1100, again)
    out = torch.empty_like(x)
    codec.decode_(again, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("zeros", [0, 1, 2, 13, 14, 15, 28, 29, 43])
def test_3lc_brings_back_runs_of_any_length(zeros: int) -> None:
    codec = ThreeLC()
    codes = torch.tensor([0, *[121] * zeros, 242, 121, 7, *[121] * zeros], dtype=torch.uint8)
    payload = codes, torch.ones(1)
    message = codec.shortened(payload, 5 * len(codes))
    again = torch.empty_like(codes), torch.empty(1)
    codec.restore_(message, 5 * len(codes), again)
    assert torch.equal(again[0], codes)
    assert len(message) <= codec.longest(payload, 5 * len(codes))
    for damaged in (message[:-1], message[:3], torch.cat((message, message[-1:]))):
        with pytest.raises(PayloadError, match="damaged, or cut short"):
            codec.restore_(damaged, 5 * len(codes), again)


def test_3lc_sends_less_in_two_phases_than_three_values_a_byte() -> None:
    group = Peers(ErrorFeedback(ThreeLC()), 4, 20 * 512, TwoPhase())
    group.exchange(tensors(4, 20 * 512))
    assert max(group.net.sent) < 0.5 * 2 * 3 / 4 * 20 * 512 / 5


# ---- natural dithering, and draws -----------------------------------------------------------------------


def test_natural_dithering_sends_powers_of_two_and_is_right_in_the_mean() -> None:
    x = tensors(1, N)[0]
    codec = NaturalDithering(bits=4, bucket=64)
    out = torch.empty_like(x)
    codec.decode_(codec.encode(x, context(x)), out)
    for row, sent in zip(x.split(64), out.split(64), strict=True):
        shares = sent.abs() / row.abs().max()
        assert set(shares.tolist()) <= {0.0, *(2.0**-j for j in range(7))}
        assert not (sent * row < 0).any()
        assert (sent.abs() <= (2 * row.abs()).clamp(min=float(row.abs().max()) / 64)).all()
    error = (mean_of_draws(codec, x, 400) - x).abs()
    assert float((error / x.abs().clamp(min=0.1)).mean()) < 0.03


def test_probabilities_add_up_and_the_largest_are_certain() -> None:
    sizes = tensors(1, N)[0].double()
    p = probabilities(sizes, 40)
    assert float(p.sum()) == pytest.approx(40)
    assert float(p.max()) == 1.0
    below = p < 1
    ratios = p[below] / sizes.abs()[below]
    assert float(ratios.max() / ratios.min()) == pytest.approx(1), "the others in proportion"
    assert float(sizes.abs()[~below].min()) >= float(sizes.abs()[below].max())
    few = torch.zeros(10).double()
    few[3], few[7] = 1e-300, -5.0
    assert probabilities(few, 4).tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("draw", [0.0, 0.3, 1 - 2**-53])
def test_exactly_so_many_are_drawn_once_each(draw: float) -> None:
    for p in (probabilities(tensors(1, N)[0].double(), 40), torch.zeros(N).double(), torch.ones(40).double()):
        index = drawn(p, 40, draw)
        assert len(index) == 40
        assert int(index.diff().min()) > 0
        assert int(index[0]) >= 0
        assert int(index[-1]) < len(p)


def test_sampled_entries_are_right_in_the_mean() -> None:
    x = tensors(1, N)[0]
    draws = 1000
    found = mean_of_draws(SampledEntries(ratio=0.1), x, draws)
    p = probabilities(x.double(), 40)
    deviation = x.abs() * ((1 - p) / p / draws).sqrt()
    assert float(((found - x).abs() / deviation.clamp(min=1e-6)).max()) < 6
    assert torch.equal(found[p == 1].float(), x[p == 1])


def test_a_sampled_spectrum_is_right_in_the_mean_and_exact_where_all_is_sent() -> None:
    x = tensors(1, 120)[0]
    matrices = (Matrix(0, 10, 12),)
    found = mean_of_draws(SampledSpectrum(rank=3, matrices=matrices), x, 600)
    assert float((found - x).norm() / x.norm()) < 0.1
    whole = mean_of_draws(SampledSpectrum(rank=10, matrices=matrices), x, 1)
    torch.testing.assert_close(whole.float(), x, rtol=1e-4, atol=1e-4)


# ---- AdaComp, chunks, sketches -------------------------------------------------------------------------


def test_adacomp_sends_what_would_reach_the_largest_of_its_bin() -> None:
    codec = AdaComp(bin=4, capacity=0.5)
    x = torch.tensor([4.0, 2.1, 1.9, 0.0, -1.0, 0.1, 0.4, 0.5])
    residual = torch.tensor([0.0, 0.0, 0.0, 3.0, 0.0, -0.9, 0.1, 0.2])
    # G: 4, 2.1, 1.9, 3 and -1, -0.8, 0.5, 0.7; H: 8, 4.2, 3.8, 3 and -2, -0.7, 0.9, 1.2.
    after = torch.empty_like(x)
    payload = codec.encode(x, context(x), residual, after)
    out = torch.empty_like(x)
    codec.decode_(payload, out)
    size = (4.0 + 2.1 + 1.0 + 0.7) / 4
    torch.testing.assert_close(out, size * torch.tensor([1.0, 1, 0, 0, -1, 0, 0, 1]))
    torch.testing.assert_close(after, x + residual - out)


def test_chunks_are_those_of_the_largest_mean_norm() -> None:
    group = Peers(LargestChunks(ratio=0.25, chunk=10), 3, 75)
    xs = tensors(3, 75)
    norms = [sum(float(x[a : a + 10].abs().sum()) for x in xs) for a in range(0, 75, 10)]
    chosen = sorted(sorted(range(8), key=lambda i: -norms[i])[:2])
    mean = group.exchange(xs)[0].mean
    expected = torch.zeros(75)
    for i in chosen:
        expected[10 * i : 10 * i + 10] = torch.stack(xs).mean(0)[10 * i : 10 * i + 10]
    torch.testing.assert_close(mean, expected)
    whole = Peers(LargestChunks(ratio=1.0, chunk=10), 3, 75).exchange(xs)[0].mean
    torch.testing.assert_close(whole, torch.stack(xs).mean(0))


def test_a_sketch_finds_what_is_large_in_the_sum_alone() -> None:
    """No rank has it among its largest; the last entries are large on each rank, and cancel."""
    xs = [0.1 * x for x in tensors(4, N)]
    for rank, x in enumerate(xs):
        x[5] = 3.0
        x[300:310] = 5.0 if rank % 2 else -5.0
    mean = Peers(CountSketch(ratio=1 / N, width=0.25, candidates=8), 4, N).exchange(xs)[0].mean
    assert mean.nonzero().flatten().tolist() == [5]
    assert float(mean[5]) == pytest.approx(3.0)


# ---- Ok-Topk -------------------------------------------------------------------------------------------


def test_with_room_for_all_the_largest_sums_of_the_chosen_arrive() -> None:
    xs, k = tensors(4, N), 20
    outcomes = Peers(ErrorFeedback(OkTopK(ratio=k / N, slack=4.0)), 4, N).exchange(xs)
    total = torch.zeros(N)
    for x in xs:
        at = x.abs().topk(k).indices
        total[at] += x[at] / 4
    kept = total.abs().topk(k).indices
    expected = torch.zeros(N).index_copy(0, kept, total[kept])
    torch.testing.assert_close(outcomes[0].mean, expected)
    for x, outcome in zip(xs, outcomes, strict=True):
        mine = torch.isin(torch.arange(N), kept) & torch.isin(torch.arange(N), x.abs().topk(k).indices)
        torch.testing.assert_close(outcome.state["residual"], torch.where(mine, 0.0, x))


@pytest.mark.parametrize("peers", [4, 8, 16])
def test_oktopk_stays_within_the_papers_bytes(peers: int) -> None:
    numel, k = 1 << 20, 10_486
    x = torch.empty(numel, device="meta")
    codec = ErrorFeedback(OkTopK(ratio=0.01))
    ctx = Context(out=x, work=DryRun(), peers=peers, name="bucket")
    _, cost = run_dry(codec.exchange(x, codec.init(x), ctx), lambda _: AxisRank(0, peers))
    bound = 6 * k * (peers - 1) / peers * 4
    assert 0.5 * bound < sum(cost.sent.values()) <= 1.1 * bound
    assert k == math.ceil(0.01 * numel)


# ---- estimates that both sides keep --------------------------------------------------------------------


def test_ef21_with_momentum_takes_the_papers_steps() -> None:
    """v <- (1 - eta) v + eta g; c = C(v - g_r); the momentum here is v / eta."""
    group = Peers(MomentumCorrection(EF21(TopK(ratio=0.1)), 0.9, masking=False), 3, N)
    v, known = torch.zeros(3, N).double(), torch.zeros(3, N).double()
    for seed in range(8):
        xs = tensors(3, N, seed)
        outcomes = group.exchange(xs)
        v = 0.9 * v + 0.1 * torch.stack(xs).double()
        for row, now in zip(known, v, strict=True):
            apart = now - row
            at = apart.abs().topk(40).indices
            row[at] += apart[at]
        torch.testing.assert_close(outcomes[2].mean.double(), known.mean(0) / 0.1, rtol=1e-4, atol=1e-3)


def test_ef21_that_sends_all_is_the_mean() -> None:
    group = Peers(EF21(Dense()), 3, N)
    for seed in range(3):
        xs = tensors(3, N, seed)
        torch.testing.assert_close(group.exchange(xs)[0].mean, torch.stack(xs).mean(0), rtol=1e-4, atol=1e-4)


def test_laq_sends_what_lag_sends_in_fewer_bytes_and_follows_it() -> None:
    matrices = (Matrix(0, 20, 20),)
    fine, rough = (Peers(kind, 3, N) for kind in (LAG(matrices=matrices), LAQ(matrices=matrices, bits=8)))
    xs = tensors(3, N)
    for round_ in range(6):
        now = [x * (1 + 0.001 * round_) for x in xs]
        a, b = fine.exchange(now)[0].mean, rough.exchange(now)[0].mean
        assert float((a - b).abs().max()) < 0.02 * float(a.abs().max())
    assert sum(rough.net.sent) < 0.9 * sum(fine.net.sent)
    before = sum(rough.net.sent)
    rough.exchange([x * 1.005 for x in xs])
    assert sum(rough.net.sent) - before <= 3 * 8, "nothing has changed enough: flags alone"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ThreeLC(2.0), r"sparsity=2.0 is not in \[1, 2\)"),
        (lambda: NaturalDithering(bits=6), "bits=6 is not a whole number, from 2 to 5"),
        (lambda: CountSketch(rows=0), "rows=0 is not a whole number"),
        (lambda: OkTopK(slack=0.9), "slack=0.9 is not a finite number, 1"),
        (lambda: LargestChunks(chunk=0), "chunk=0 is not a whole number"),
        (lambda: SampledSpectrum(rank=0), "rank=0 is not a whole number"),
        (lambda: AdaComp(bin=0), "bin=0 is not a whole number"),
    ],
)
def test_what_cannot_be_is_refused(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
