"""What all predictors promise, and what the plain ones and MP²'s network say of known motions."""

import pickle
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool1d

from cases import for_each
from tacit.errors import ConfigError
from tacit.prediction.extrapolation import Exponential, Linear, Persistent, Stale
from tacit.prediction.networks import weight_files
from tacit.prediction.networks.loading import trained as opened
from tacit.prediction.networks.mp2 import FLOPS, MP2, SHAPES, SHIPPED, MP2Network, flops, normalised
from tacit.prediction.networks.wnn import WNN, networks
from tacit.prediction.predictor import KINDS, Predictor, Seen, in_a_row, kind_of


def trained(seed: int, width: int = 4) -> weight_files.Weights:
    """Networks that predict something."""
    torch.manual_seed(seed)
    networks = {kind: MP2Network(width) for kind in KINDS}
    for network in networks.values():
        nn.init.normal_(network.last.weight)
    return {kind: {k: p.detach() for k, p in n.named_parameters()} for kind, n in networks.items()}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    file = tmp_path / "mp2.pt"
    weight_files.write(file, "mp2", trained(0))
    return str(file)


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.randn(2, n, generator=torch.Generator().manual_seed(seed))


def heard(changes: list[float], ages: list[int]) -> Seen:
    """Of one element: changes that were heard of, older first, and how many rounds ago."""
    return in_a_row(torch.tensor(changes).unsqueeze(1))._replace(
        ages=torch.tensor(ages, dtype=torch.float32).unsqueeze(1)
    )


def test_networks_are_there_without_a_random_number(weights: str) -> None:
    """A script's own numbers are where they would be without tacit, whatever it imports and reads."""
    before = torch.get_rng_state()
    for file in Path(weight_files.__file__).parent.glob("*.py"):
        runpy.run_path(str(file), run_name="made_up")
    for predictor in (MP2(weights), MP2(), WNN()):
        assert predictor.kinds()
    networks.__wrapped__("")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_line_goes_on() -> None:
    assert Linear().change(in_a_row(torch.full((2, 3), 0.5)), "linear").tolist() == [0.5] * 3
    # The slope of 0, 0, 1 over 0 .. 2 by least squares.
    assert float(Linear().change(heard([0.0, 1.0], [2, 1]), "linear")) == pytest.approx(0.5)


def test_a_decay_goes_on_from_wherever_it_was_heard_of() -> None:
    decay = torch.tensor([1.0, 0.5]).unsqueeze(1).repeat(1, 2) * torch.tensor([1.0, -1e-20])
    torch.testing.assert_close(
        Exponential().change(in_a_row(decay), "linear"), torch.tensor([0.25, -0.25e-20])
    )
    # 0.5 a round, heard of four and two rounds ago: 1/16 and 1/64 of what it was before both.
    assert float(Exponential().change(heard([1.0, 0.25], [4, 2]), "linear")) == pytest.approx(1 / 16)
    assert float(Exponential().change(heard([1.0, -1.0], [2, 1]), "linear")) == 0


def test_a_change_after_none_goes_on() -> None:
    """Rounds in which an element was not heard of are no changes of 0: of 0, d, and two such, d is known."""
    assert float(Exponential().change(heard([0.0, 0.7], [4, 3]), "linear")) == pytest.approx(0.7)


def test_a_share_is_left_of_a_change_for_each_round_since() -> None:
    assert float(Persistent(0.5).change(heard([0.0, 0.8], [4, 3]), "linear")) == pytest.approx(0.1)
    assert float(Persistent(0.0).change(heard([0.0, 0.8], [4, 3]), "linear")) == 0


def test_stale_predicts_nothing() -> None:
    assert not bool(Stale().change(in_a_row(noise(5)), "linear").any())


@for_each("which", ["stale", "linear", "exponential", "persistent", "wnn", "mp2"])
@for_each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_never_moved_stays_and_the_past_is_left_alone(
    which: str, dtype: torch.dtype, weights: str
) -> None:
    each: Predictor = {
        "stale": Stale(),
        "linear": Linear(),
        "exponential": Exponential(),
        "persistent": Persistent(),
        "wnn": WNN(),
    }.get(which, MP2(weights))
    past = noise(50).to(dtype)
    past[:, 7] = 0
    before = past.clone()
    change = each.change(in_a_row(past), "linear")
    assert change.shape == (50,)
    assert change.dtype == dtype
    assert bool(change.isfinite().all())
    assert float(change[7]) == 0
    assert torch.equal(past, before)
    assert torch.equal(change, each.change(in_a_row(past), "linear"))


def test_the_untrained_network_predicts_no_change() -> None:
    x, _ = normalised(in_a_row(noise(10)))
    assert not bool(MP2Network()(x).any())


@pytest.mark.parametrize("width", [1, 4, 8])
def test_it_is_convolution_channel_attention_and_max_pooling(width: int) -> None:
    """By torch's own layers."""
    weights = trained(5, width)["linear"]
    network = MP2Network(width)
    network.load_state_dict(weights)
    x, _ = normalised(Seen(noise(50, 6), noise(50, 7).abs() + 1, noise(50, 8).exp()))
    y = network.second(network.first(x.permute(2, 0, 1)).relu()).relu()
    y = y * network.excite(network.squeeze(y.mean(2)).relu()).sigmoid().unsqueeze(2)
    expected = network.last(max_pool1d(y, 2).flatten(1)).squeeze(1)
    torch.testing.assert_close(network(x), expected, rtol=1e-4, atol=1e-5)


def test_prediction_scales_with_the_motion(weights: str) -> None:
    past = noise(30, 1)
    small = MP2(weights).change(in_a_row(past), "convolution")
    assert bool(small.any())
    torch.testing.assert_close(MP2(weights).change(in_a_row(past * 1024), "convolution"), small * 1024)


def test_how_old_changes_are_and_how_the_layer_swings_is_told(weights: str) -> None:
    seen = in_a_row(noise(30, 1))
    changes = [
        MP2(weights).change(each, "convolution")
        for each in (seen, seen._replace(ages=seen.ages + 1), seen._replace(swings=seen.swings / 2))
    ]
    assert not torch.equal(changes[0], changes[1])
    assert not torch.equal(changes[0], changes[2])
    for swings in (torch.zeros(2, 30), torch.full((2, 30), torch.inf)):
        assert bool(MP2(weights).change(seen._replace(swings=swings), "convolution").isfinite().all())


def test_each_kind_has_its_own_network(weights: str) -> None:
    changes = [MP2(weights).change(in_a_row(noise(30)), kind) for kind in KINDS]
    assert all(not torch.equal(changes[0], other) for other in changes[1:])


def test_kinds_without_a_network_do_not_change(tmp_path: Path) -> None:
    weight_files.write(tmp_path / "one.pt", "mp2", {"linear": trained(0)["linear"]})
    predictor = MP2(str(tmp_path / "one.pt"))
    assert predictor.kinds() == ("linear",)
    assert bool(predictor.change(in_a_row(noise(5)), "linear").any())
    assert not bool(predictor.change(in_a_row(noise(5)), "convolution").any())


def test_a_network_costs_what_an_element_may() -> None:
    assert max(width for width in range(1, 40) if flops(width) <= FLOPS) == 8
    with pytest.raises(ConfigError, match=r"width=9 costs .* write 8 or less"):
        MP2Network(9)


def test_kinds_by_dims() -> None:
    assert [kind_of(dims) for dims in (0, 1, 2, 3, 4)] == ["vector", "vector", "linear"] + ["convolution"] * 2


# ---- files --------------------------------------------------------------------------------------------


def spoilt(tmp_path: Path, **other: object) -> str:
    """A file that is right but for these entries."""
    weight_files.write(tmp_path / "bad.pt", "mp2", trained(0))
    torch.save(torch.load(tmp_path / "bad.pt") | other, tmp_path / "bad.pt")
    return str(tmp_path / "bad.pt")


def without_last() -> weight_files.Weights:
    return {"linear": {k: w for k, w in trained(0)["linear"].items() if k != "last.bias"}}


def with_nan() -> weight_files.Weights:
    weights = trained(0)["linear"]
    return {"linear": weights | {"first.bias": torch.full_like(weights["first.bias"], torch.nan)}}


def of_two_widths() -> weight_files.Weights:
    second = {k: w for k, w in trained(0, 8)["linear"].items() if k.startswith("second")}
    return {"linear": trained(0)["linear"] | second}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"version": 9}, "of version 9, and this tacit reads version 2"),
        ({"format": "else"}, "holds no predictor of tacit"),
        ({"network": "wnn"}, "for the network 'wnn', not 'mp2'"),
        ({"kinds": {}}, "for no kind of layer"),
        ({"kinds": {"attention": {}}}, "of kind 'attention', and known are convolution"),
        ({"kinds": without_last()}, "of kind 'linear' it should hold .*last.bias"),
        ({"kinds": of_two_widths()}, "linear.second.* has shape .* and the others need"),
        ({"kinds": with_nan()}, "linear.first.bias holds NaN"),
    ],
)
def test_files_that_cannot_be_are_refused(tmp_path: Path, other: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MP2(spoilt(tmp_path, **other)).kinds()


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps({"a": print}, protocol=2)])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.pt").write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged, or no predictor file"):
        MP2(str(tmp_path / "bad.pt")).kinds()


def test_a_file_cut_short_or_with_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    whole = bytearray(Path(spoilt(tmp_path)).read_bytes())
    half = whole[: len(whole) // 2]
    whole[whole.index(trained(0)["linear"]["first.weight"].numpy().tobytes()) + 3] ^= 1
    for damaged in (half, whole):
        (tmp_path / "bad.pt").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is damaged, or no predictor file"):
            MP2(str(tmp_path / "bad.pt")).kinds()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no predictor file .*none\.pt"):
        MP2(str(tmp_path / "none.pt")).kinds()


def test_shapes_are_those_of_the_network() -> None:
    assert {k: len(p.shape) for k, p in MP2Network().named_parameters()} == {
        k: len(v) for k, v in SHAPES.items()
    }


@pytest.mark.parametrize("kind", ["convolution", "linear", "vector"])
def test_what_comes_with_tacit_knows_momentum(kind: str) -> None:
    """Changes that shrink by a tenth a step, as momentum without gradients does, four steps a round."""
    assert kind in MP2().kinds()
    first = noise(200)[0] * 1e-3
    for ages in (2, 1), (4, 2):
        seen = in_a_row(torch.stack([first * 0.656**-age for age in ages]))
        seen = seen._replace(ages=torch.tensor(ages, dtype=torch.float32).unsqueeze(1).expand(2, 200))
        followed = MP2().change(seen, kind) / first
        assert float(followed.min()) > 0.1
        assert float(followed.max()) < 1.7


@pytest.mark.parametrize("network", ["mp2", "wnn"])
def test_what_comes_with_tacit_is_small_and_says_how_it_was_made(network: str) -> None:
    file = SHIPPED.with_name(f"{network}.pt")
    assert file.stat().st_size < 150_000
    assert "tacit predictor record\ntacit predictor train" in weight_files.note_of(file)
    assert opened(str(file)).kinds() == ("convolution", "vector", "linear")


def test_wnn_comes_with_weights_that_go_on_where_things_went() -> None:
    line = WNN().change(in_a_row(torch.full((4, 1), 0.01)), "linear")
    assert 0 < float(line) < 0.02


def test_a_file_says_for_which_network_it_is(tmp_path: Path, weights: str) -> None:
    assert isinstance(opened(weights), MP2)
    weight_files.write(tmp_path / "other.pt", "cnn", {"linear": {}})
    with pytest.raises(ConfigError, match="for the network 'cnn', and known are mp2 and wnn"):
        opened(str(tmp_path / "other.pt"))


def test_operations_are_counted() -> None:
    each = [Stale().operations, Linear().operations, Exponential().operations, MP2().operations]
    assert each == sorted(each)
    assert each[-1] == flops(4)
    assert (WNN().operations or 0) > 2 * 9425
