"""Residual networks for CIFAR's images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import pad, relu

from tacit_lab.recipes.models.weights import draw_for_relu

WIDTHS = (16, 32, 64)


def resnet20(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-20 for images of shape (channels, 32, 32): 0.27 million parameters.

    Source: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2, n = 3.
    """
    return _resnet(3, classes, channels)


def resnet8(classes: int = 10, channels: int = 3) -> nn.Module:
    """The same with n = 1, eight layers deep: 0.075 million parameters."""
    return _resnet(1, classes, channels)


class ResidualBlock(nn.Module):
    """Two convolutions of 3x3, added to their input."""

    def __init__(self, before: int, width: int) -> None:
        """Make the layers; where `width` is more than `before`, images are halved."""
        super().__init__()
        self.stride = 1 if before == width else 2
        self.more = width - before
        self.first = nn.Conv2d(before, width, 3, self.stride, padding=1, bias=False)
        self.norm_first = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_second = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, before, height, width) to (batch, width, height / stride, width / stride)."""
        added = self.norm_second(self.second(relu(self.norm_first(self.first(x)))))
        return relu(self._shortcut(x) + added)

    def _shortcut(self, x: Tensor) -> Tensor:
        """The paper's option A: every second pixel, and zeros for the channels that are new."""
        if not self.more:
            return x
        return pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))


def _resnet(blocks: int, classes: int, channels: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
        nn.BatchNorm2d(WIDTHS[0]),
        nn.ReLU(),
    ]
    before = WIDTHS[0]
    for width in WIDTHS:
        for _ in range(blocks):
            layers.append(ResidualBlock(before, width))
            before = width
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    draw_for_relu(network)
    return network
