"""VGG-11 in the size of CIFAR's images: what the benchmarks time."""

from __future__ import annotations

from torch import nn

CHANNELS = (64, 128, 256, 256, 512, 512, 512, 512)
POOL_BEHIND = (0, 1, 3, 5, 7)


def vgg11(classes: int = 10) -> nn.Sequential:
    """VGG-11 without batch normalization, for images of shape (3, 32, 32): 9.2 million parameters.

    Source: Simonyan & Zisserman 2015, configuration A, with one linear layer behind the convolutions, as is
    usual for CIFAR.
    """
    layers: list[nn.Module] = []
    before = 3
    for i, channels in enumerate(CHANNELS):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
        if i in POOL_BEHIND:
            layers.append(nn.MaxPool2d(2))
        before = channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before, classes))
