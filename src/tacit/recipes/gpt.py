"""A decoder-only transformer, as small as it can be read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

__all__ = ["GPT"]


class GPT(nn.Module):
    """Pre-norm blocks over learned positions; the last layer shares the embedding's weights."""

    def __init__(self, *, vocabulary: int, length: int, width: int, heads: int, blocks: int) -> None:
        """Draw all weights from a normal distribution of deviation 0.05, and the biases as zeros."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.05)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next token, (batch, time, vocabulary), from tokens of shape (batch, time)."""
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        scores: Tensor = self.norm(self.blocks(x)) @ self.tokens.weight.T
        return scores


class Block(nn.Module):
    """Attention to what came before, then two fully connected layers; both are added to their input."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers; `heads` must divide `width`."""
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self._attend(self.norm_attention(x))
        hidden: Tensor = self.narrow(gelu(self.wide(self.norm_mlp(x))))
        return x + hidden

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.queries_keys_values(x).view(batch, time, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        joined: Tensor = self.joined(seen.transpose(1, 2).reshape(batch, time, width))
        return joined
