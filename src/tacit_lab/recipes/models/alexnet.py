"""AlexNet in the size of CIFAR's images."""

from __future__ import annotations

from torch import nn

from tacit_lab.recipes.models.weights import draw_for_relu


def alexnet(classes: int = 10, channels: int = 3) -> nn.Sequential:
    """Five convolutions and three fully connected layers, with two thirds of its 0.99 million parameters.

    Source: Krizhevsky, Sutskever & Hinton 2012, section 3.5, for images of shape (channels, 32, 32). The
    kernels are smaller, there is a third of the channels and a tenth of the units, and neither local response
    normalization nor dropout; pools overlap, as theirs do.
    """
    network = nn.Sequential(
        *_convolution(channels, 32, 5),
        _pool(),
        *_convolution(32, 64, 5),
        _pool(),
        *_convolution(64, 128, 3),
        *_convolution(128, 96, 3),
        *_convolution(96, 96, 3),
        _pool(),
        nn.Flatten(),
        nn.Linear(96 * 4 * 4, 384),
        nn.ReLU(inplace=True),
        nn.Linear(384, 192),
        nn.ReLU(inplace=True),
        nn.Linear(192, classes),
    )
    draw_for_relu(network)
    return network


def _convolution(before: int, width: int, kernel: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, width, kernel, padding=kernel // 2), nn.ReLU(inplace=True)


def _pool() -> nn.Module:
    """Halve the images, by the largest of 3x3 pixels."""
    return nn.MaxPool2d(3, stride=2, padding=1)
