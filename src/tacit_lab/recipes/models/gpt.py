"""A decoder-only transformer, as small as it can be read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit_lab.recipes.models.transformer import TransformerBlock, draw_small


class GPT(nn.Module):
    """Pre-norm blocks over learned positions; the last layer shares the embedding's weights."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        """Draw all weights from a normal distribution of deviation 0.05, and the biases as zeros."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal=True) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        draw_small(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token, (batch, time, vocabulary), from tokens of shape (batch, time)."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        scores: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return scores
