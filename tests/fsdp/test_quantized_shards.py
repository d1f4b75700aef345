"""What travels, quantized, of a module that FSDP2 shards; on real ranks: `sharded_setup_checks`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from host_sync import NoHostSync
from torch import Tensor, nn

import tacit
from tacit.errors import AttachError, ConfigError
from tacit.fsdp import quantized
from tacit.fsdp.quantized import Gather, Rows, Scatter, ShardBytes
from tacit.kernels.dispatch import emulated_device

MATRIX, VECTOR = torch.empty(2, 2), torch.empty(2)
WIDTHS = [(MATRIX, 700), (VECTOR, 5), (MATRIX, 300), (VECTOR, 2)]
WIDTH, ENTRIES, BLOCKS = 1007, 1000, 2
KINDS = [(bits, at_random) for bits in (2, 3, 4, 8) for at_random in (False, True)]


def shards(n: int = 3, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vectors(rows: Tensor) -> Tensor:
    return torch.cat([rows[:, 700:705], rows[:, 1005:]], 1)


def decoded(rows: Rows, messages: Tensor, like: Tensor) -> Tensor:
    out = torch.full_like(like, torch.nan)
    rows.spread(messages, out)
    return out


@pytest.mark.parametrize(("bits", "at_random"), KINDS)
def test_a_message_has_exactly_these_bytes(bits: int, at_random: bool) -> None:
    levels = 1024 * bits // 8 if at_random or bits > 2 else 2 * 103
    message = Rows(WIDTHS, bits, at_random).encode(shards())
    assert message.shape == (3, levels + BLOCKS * (4 if at_random else 2) + 7 * 4)
    assert message.dtype == torch.uint8
    assert message.shape[1] == Rows(WIDTHS, bits, at_random).nbytes(torch.float32)
    halves = Rows(WIDTHS, bits, at_random).encode(shards(dtype=torch.bfloat16))
    assert message.shape[1] - halves.shape[1] == 7 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "at_random"), KINDS)
def test_entries_arrive_within_a_level_and_vectors_as_they_are(
    bits: int, at_random: bool, dtype: torch.dtype
) -> None:
    given = shards(dtype=dtype)
    found = decoded(Rows(WIDTHS, bits, at_random), Rows(WIDTHS, bits, at_random).encode(given, 7), given)
    assert torch.equal(vectors(found), vectors(given))
    level = float(given.abs().max()) / (2 ** (bits - 1) - 1)
    assert 0 < float((found - given).float().abs().max()) <= level * (1.01 if at_random else 0.51) + 0.02


def test_a_vector_does_not_decide_a_matrix_levels() -> None:
    given = shards()
    large = given.clone()
    large[:, 700:705] = 1e6
    rows = Rows(WIDTHS, 4, at_random=False)
    found, other = decoded(rows, rows.encode(given), given), decoded(rows, rows.encode(large), given)
    assert torch.equal(found[:, :700], other[:, :700])


@pytest.mark.parametrize(("bits", "at_random"), KINDS)
def test_a_sum_is_that_of_what_arrives(bits: int, at_random: bool) -> None:
    rows, given = Rows(WIDTHS, bits, at_random), shards()
    messages = rows.encode(given, 3)
    out = torch.full((WIDTH,), torch.nan)
    rows.add(messages, 0.25, out)
    torch.testing.assert_close(out, 0.25 * decoded(rows, messages, given).sum(0))


def test_rounding_at_random_is_right_in_the_mean() -> None:
    rows, given = Rows(WIDTHS, 2, at_random=True), shards(1)
    mean = sum(decoded(rows, rows.encode(given, seed), given) for seed in range(400)) / 400
    assert float((mean - given).abs().max()) < 0.8  # one seed is up to 3 away


@pytest.mark.parametrize(("bits", "at_random"), [(2, False), (4, True), (8, False)])
def test_what_would_run_on_a_gpu_has_the_same_bits(bits: int, at_random: bool) -> None:
    rows, given = Rows(WIDTHS, bits, at_random), shards()
    messages = rows.encode(given, 5)
    with emulated_device():
        assert torch.equal(rows.encode(given, 5), messages)
        assert torch.equal(decoded(rows, messages, given), decoded(rows, messages, given))


# ---- inputs that are not like the others --------------------------------------------------------------


@pytest.mark.parametrize(
    "widths", [[(VECTOR, 3)], [(MATRIX, 1)], [(MATRIX, 0), (VECTOR, 0)], [(MATRIX, 512)]]
)
@pytest.mark.parametrize("at_random", [False, True])
def test_modules_of_vectors_alone_of_one_entry_and_of_none(widths: Any, at_random: bool) -> None:
    rows = Rows(widths, 4, at_random)
    given = torch.ones(2, sum(width for _, width in widths))
    torch.testing.assert_close(decoded(rows, rows.encode(given), given), given, rtol=0.01, atol=0)


@pytest.mark.parametrize("value", [0.0, 1e-44, -1e-39, 3.4028234e38])
@pytest.mark.parametrize(("bits", "at_random"), KINDS)
def test_zeros_denormals_and_the_largest(value: float, bits: int, at_random: bool) -> None:
    rows, given = Rows(WIDTHS, bits, at_random), torch.full((1, WIDTH), value)
    found = decoded(rows, rows.encode(given), given)
    assert torch.equal(vectors(found), vectors(given))
    assert bool(found.isfinite().all())
    assert float((found - given)[:, :700].abs().max()) <= max(abs(value) * 0.01, 1e-37)


# ---- FSDP2's collectives ------------------------------------------------------------------------------


class Echo:
    """FSDP2's own collective, which counts its calls; and a group of two, whose other rank sends the same."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)

    def __call__(self, **given: Any) -> None:
        self.calls.append(given)

    def allocate(self, size: Any, **given: Any) -> Tensor:
        return torch.empty(*size, **given)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    monkeypatch.setattr(quantized, "gather_rows", lambda mine, group: torch.stack([mine, mine]))
    monkeypatch.setattr(quantized, "swap_rows", lambda rows, group: rows)
    return Echo()


def scatter(echo: Echo, bits: int, feedback: bool, factor: float | None = None) -> Scatter:
    rows = Rows(WIDTHS, bits, at_random=not feedback)
    return Scatter(rows, echo, ShardBytes(), SimpleNamespace(divide_factor=factor), feedback, "0|w")  # type: ignore[arg-type]


def reduced(by: Scatter, given: Tensor, echo: Echo, op: Any = dist.ReduceOp.SUM) -> Tensor:
    out = torch.empty(WIDTH)
    by(output_tensor=out, input_tensor=given.reshape(-1), group=echo.group, op=op)
    return out


def test_means_sums_and_sums_by_a_factor(echo: Echo) -> None:
    given = shards(2)
    total = reduced(scatter(echo, 8, True), given, echo)
    torch.testing.assert_close(total, given.sum(0), rtol=0, atol=0.04)
    mean = reduced(scatter(echo, 8, True), given, echo, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, total / 2)
    by_factor = reduced(scatter(echo, 8, True, factor=8.0), given, echo, "premultiplied")
    torch.testing.assert_close(by_factor, total / 8)


@pytest.mark.parametrize("bits", [2, 4])
def test_what_was_sent_and_what_is_owed_is_the_gradient(echo: Echo, bits: int) -> None:
    by, given, sent = scatter(echo, bits, True), shards(2), torch.zeros(WIDTH)
    for _ in range(20):
        sent += reduced(by, given, echo)
    unseen = Rows(WIDTHS, bits, at_random=False)
    once = decoded(unseen, unseen.encode(given), given).sum(0)
    without, with_ = ((each / n - given.sum(0)).abs().max() for each, n in ((once, 1), (sent, 20)))
    assert float(with_) < float(without) / 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_nan_or_an_infinity_is_seen_once_and_is_not_owed(echo: Echo, value: float, feedback: bool) -> None:
    by, given = scatter(echo, 4, feedback), shards(2)
    given[0, 3] = value
    found = reduced(by, given, echo)
    assert bool(found[:512].isnan().all())
    assert bool(found[512:].isfinite().all())
    assert bool(reduced(by, shards(2), echo).isfinite().all())


def test_the_host_waits_for_nothing(echo: Echo) -> None:
    shard, out = shards(1).view(-1), torch.empty(2 * WIDTH)
    for feedback in (False, True):
        by, given, mean = scatter(echo, 4, feedback), shards(2).view(-1), torch.empty(WIDTH)
        with emulated_device(), NoHostSync():
            for _ in range(2):
                by(output_tensor=mean, input_tensor=given, group=echo.group, op=dist.ReduceOp.SUM)
    rows = Rows(WIDTHS, 8, at_random=False)
    with emulated_device(), NoHostSync():
        Gather(rows, echo, ShardBytes())(out, shard, echo.group)
    assert torch.equal(out[:WIDTH], out[WIDTH:])


def test_what_is_not_as_it_was_known_travels_as_it_is(echo: Echo) -> None:
    traffic = ShardBytes()
    gather = Gather(Rows(WIDTHS, 8, at_random=False), echo, traffic)
    for shard in (torch.ones(WIDTH - 1), torch.ones(WIDTH, dtype=torch.uint8)):
        gather(torch.empty(2 * len(shard)), shard, echo.group)
    assert len(echo.calls) == 2
    assert traffic == ShardBytes(4 * (WIDTH - 1) + WIDTH, 4 * (WIDTH - 1) + WIDTH)
    few = Gather(Rows([(MATRIX, 20)], 8, at_random=False), echo, ShardBytes())
    few(torch.empty(40), torch.ones(20), echo.group)
    assert len(echo.calls) == 3, "a message of 514 bytes is longer than 80"
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    gather(torch.empty(WIDTH), torch.ones(WIDTH), alone)
    assert len(echo.calls) == 4


# ---- what cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"weights": 1}, "weights=1"),
        ({"weights": 16}, "weights=16"),
        ({"gradients": 9}, "gradients=9"),
        ({"gradients": 4.0}, "gradients=4.0"),
        ({"seed": -1}, "seed=-1"),
        ({"feedback": "yes"}, "feedback='yes'"),
        ({"weights": None, "gradients": None}, "leave everything as it is"),
        ({"gradients": None, "feedback": True}, "feedback=True is for gradients"),
    ],
)
def test_options_that_cannot_be(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tacit.quantize_shards(nn.Linear(2, 2), **given)


def test_a_model_that_nobody_has_sharded() -> None:
    with pytest.raises(AttachError, match=r"call torch\.distributed\.fsdp\.fully_shard first"):
        tacit.quantize_shards(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ("takes_collectives", "lets nobody choose"),
        ("communicates_plainly", "has collectives of its own"),
        ("on_host", "is offloaded to the CPU"),
    ],
)
def test_modules_that_cannot_be_quantized(broken: str, says: str) -> None:
    fit = {"takes_collectives": True, "communicates_plainly": True, "on_host": False}
    group: Any = SimpleNamespace(**{**fit, broken: not fit[broken]}, widths=lambda frozen: [(VECTOR, 2)])
    with pytest.raises(AttachError, match=says):
        quantized._check([group], {id(VECTOR): "w"})
