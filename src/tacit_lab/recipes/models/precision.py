"""Compute in bfloat16 what may be, for CPUs that have instructions for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tacit.torch_compat import has_bf16_products


def is_native() -> bool:
    """Whether torch knows instructions of this CPU for it; without them bfloat16 is far slower than fp32."""
    return has_bf16_products()


class InBfloat16(nn.Module):
    """Runs a network under torch's autocast; parameters, gradients and scores stay fp32."""

    def __init__(self, network: nn.Module) -> None:
        """Wrap a network."""
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        """What the network answers, in fp32."""
        with torch.autocast(inputs.device.type, torch.bfloat16):
            outputs: Tensor = self.network(inputs)
        return outputs.float()
