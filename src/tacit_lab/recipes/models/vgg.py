"""VGG-11 in the size of CIFAR's images, and a narrow one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tacit_lab.recipes.models.weights import draw_for_relu

CHANNELS = (64, 128, 256, 256, 512, 512, 512, 512)
POOL_BEHIND = (0, 1, 3, 5, 7)


def vgg11(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """VGG-11 without batch normalization, for images of shape (channels, 32, 32): 9.2 million parameters.

    Source: Simonyan & Zisserman 2015, configuration A, with one linear layer after the convolutions, as is
    usual for CIFAR.
    """
    return _vgg(CHANNELS, classes, channels)


def vgg11_narrow(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """VGG-11 with 5/32 of its channels, 10 to 80: 0.23 million parameters."""
    return _vgg([width * 5 // 32 for width in CHANNELS], classes, channels)


def _vgg(widths: Sequence[int], classes: int, before: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, width in enumerate(widths):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
        if i in POOL_BEHIND:
            layers.append(nn.MaxPool2d(2))
        before = width
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, classes))
    draw_for_relu(network)
    return network
