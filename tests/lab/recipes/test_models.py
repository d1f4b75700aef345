import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from cases import for_each
from tacit.errors import ConfigError
from tacit_lab.recipes import models
from tacit_lab.recipes.models.precision import InBfloat16
from tacit_lab.recipes.models.resnet import ResidualBlock

PARAMETERS = {
    "alexnet": 987_338,
    "lenet": 62_006,
    "resnet8": 75_290,
    "resnet20": 269_722,
    "vgg11": 9_225_610,
    "vgg11-narrow": 226_510,
    "vit": 257_930,
}

EVERY = pytest.mark.parametrize("name", models.known())


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


@EVERY
def test_a_network_has_the_parameters_that_its_docstring_says(name: str) -> None:
    assert count(models.build(name, channels=3, classes=10)) == PARAMETERS[name]


def test_published_sizes() -> None:
    assert count(models.build("lenet", channels=1, classes=10)) == 61_706  # LeNet-5, all maps connected
    assert (
        round(count(models.build("resnet20", channels=3, classes=10)) / 1e6, 2) == 0.27
    )  # He et al., table 6


@EVERY
@for_each("channels", [1, 3])
def test_a_network_maps_images_to_scores_and_every_parameter_learns(name: str, channels: int) -> None:
    torch.manual_seed(0)
    network = models.build(name, channels=channels, classes=7)
    scores = network(torch.randn(4, channels, 32, 32))
    assert scores.shape == (4, 7)
    cross_entropy(scores, torch.tensor([0, 1, 2, 6])).backward()  # type: ignore[no-untyped-call]
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 0, key


@EVERY
def test_an_untrained_network_guesses(name: str) -> None:
    """Its loss is near that of equal chances, so that the first steps are neither lost nor wild."""
    torch.manual_seed(0)
    network = models.build(name, channels=3, classes=10)
    loss = cross_entropy(network(torch.randn(64, 3, 32, 32)), torch.randint(10, (64,)))
    assert 2.2 < loss < 2.8


def test_layers_of_a_resnet() -> None:
    """6n + 2 of them: a convolution, 3 n blocks of two, and the last."""
    for name, n in (("resnet8", 1), ("resnet20", 3)):
        network = models.build(name, channels=3, classes=10)
        assert (
            len([layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)])
            == 6 * n + 2
        )


def test_a_shortcut_halves_images_and_fills_up_with_zeros() -> None:
    block = ResidualBlock(2, 4)
    x = torch.rand(1, 2, 8, 8)
    for norm in (block.norm_first, block.norm_second):
        norm.weight.data.zero_()
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()


def test_a_patch_of_a_vit_sees_all_others() -> None:
    torch.manual_seed(0)
    network = models.build("vit", channels=3, classes=10)
    x = network.patches(torch.randn(1, 3, 32, 32)).flatten(2).transpose(1, 2)
    changed = x.clone()
    changed[0, -1] += 1
    assert (network.blocks(x) - network.blocks(changed))[0, 0].abs().max() > 0


def test_in_bfloat16_parameters_gradients_and_scores_stay_fp32() -> None:
    torch.manual_seed(0)
    network = models.build("vgg11-narrow", channels=3, classes=10)
    images = torch.randn(4, 3, 32, 32)
    exact, scores = network(images), InBfloat16(network)(images)
    assert scores.dtype == torch.float32
    assert 0 < (scores - exact).abs().max() < 0.1 * exact.abs().max()
    scores.sum().backward()
    assert {parameter.grad.dtype for parameter in network.parameters()} == {torch.float32}


def test_an_unknown_network_is_told_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown model 'resnet18'\. Did you mean .*'resnet8'.*Known: alexnet"
    ):
        models.build("resnet18", channels=3, classes=10)
