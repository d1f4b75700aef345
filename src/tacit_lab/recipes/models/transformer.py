"""A transformer's block, of which networks for text and for images are made."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class TransformerBlock(nn.Module):
    """Attention, then two fully connected layers; both take it normalized and are added to it."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        """Make the layers; `heads` must divide `width`. If `causal`, no place sees what comes later."""
        super().__init__()
        self.heads, self.causal = heads, causal
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
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=self.causal)
        joined: Tensor = self.joined(seen.transpose(1, 2).reshape(batch, time, width))
        return joined


def draw_small(network: nn.Module) -> None:
    """Draw all weights in place from a normal distribution of deviation 0.05; biases are zeros."""
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=0.05)
            elif name.endswith("bias"):
                parameter.zero_()
