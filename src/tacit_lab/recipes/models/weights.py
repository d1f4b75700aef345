"""How weights are drawn where nothing normalizes what flows through them."""

from __future__ import annotations

import torch
from torch import nn

GUESS = 0.1
"""The last layer is multiplied by it, so that an untrained network gives all classes about equal chances."""


def draw_for_relu(network: nn.Sequential) -> None:
    """Draw every weight in place so that ReLUs neither shrink nor blow up what passes; biases are zeros.

    torch's own weights are smaller, and a deep network without normalization then hardly begins to learn.

    Source: He et al. 2015, "Delving Deep into Rectifiers", section 2.2.

    Args:
        network: Its last layer is linear and gives the scores.
    """
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    last = network[-1]
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight.mul_(GUESS)
