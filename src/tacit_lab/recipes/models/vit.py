"""A vision transformer in the size of CIFAR's images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit_lab.recipes.models.transformer import TransformerBlock, draw_small

SIDE = 32
"""Pixels on each side of an image."""
PATCH = 4
"""Pixels on each side of a patch."""


def vit(classes: int = 10, channels: int = 3) -> nn.Module:
    """Five blocks of width 64 over 64 patches of 4x4 pixels: 0.26 million parameters."""
    return ViT(classes=classes, channels=channels, width=64, heads=4, blocks=5)


class ViT(nn.Module):
    """Pre-norm blocks over patches with learned positions; the mean over the patches is classified.

    Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", section 3.1, with the mean in place of a
    class token (their appendix D.3), and without dropout.
    """

    def __init__(self, *, classes: int, channels: int, width: int, heads: int, blocks: int) -> None:
        """Draw all weights from a normal distribution of deviation 0.05, and the biases as zeros."""
        super().__init__()
        self.patches = nn.Conv2d(channels, width, PATCH, stride=PATCH)
        self.places = nn.Parameter(torch.empty((SIDE // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=False) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, classes)
        draw_small(self)

    def forward(self, images: Tensor) -> Tensor:
        """Scores of shape (batch, classes) of images of shape (batch, channels, 32, 32)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.scores(self.norm(self.blocks(x)).mean(1))
        return scores
