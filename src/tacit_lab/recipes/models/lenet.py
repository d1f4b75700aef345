"""LeNet-5, for handwritten digits."""

from __future__ import annotations

from torch import nn

from tacit_lab.recipes.models.weights import draw_for_relu


def lenet5(classes: int = 10, channels: int = 1) -> nn.Sequential:
    """LeNet-5 for images of shape (channels, 32, 32): 61,706 parameters for one channel.

    Source: LeCun et al. 1998, "Gradient-Based Learning Applied to Document Recognition", section II.B, with
    ReLUs, the largest of 2x2 pixels, all maps connected, and scores in place of distances.
    """
    network = nn.Sequential(
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 5 * 5, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
        nn.Linear(84, classes),
    )
    draw_for_relu(network)
    return network
