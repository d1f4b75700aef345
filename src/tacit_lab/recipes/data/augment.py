"""Change training images a little, differently each time."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn.functional import pad

MARGIN = 4


def noise(seed: int, epoch: int, rank: int) -> torch.Generator:
    """Random numbers that no other epoch or rank of this seed draws."""
    digest = hashlib.blake2b(f"{seed} {epoch} {rank}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by up to 4 pixels in both directions, over black, and mirror half of them.

    Source: He et al. 2016, section 4.2.

    Args:
        images: Of shape (batch, channels, height, width), uint8.
        generator: Decides which image is moved where.

    Returns:
        New images of the same shape and type.
    """
    batch, channels, height, width = images.shape
    moves = torch.randint(2 * MARGIN + 1, (2, batch, 1), generator=generator)
    mirrored = torch.rand((batch, 1), generator=generator) < 0.5
    rows = moves[0] + torch.arange(height)
    columns = moves[1] + torch.where(mirrored, torch.arange(width - 1, -1, -1), torch.arange(width))
    padded = pad(images, (MARGIN, MARGIN, MARGIN, MARGIN))
    places = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    flat = padded.view(batch, channels, -1)
    return flat.gather(2, places.view(batch, 1, -1).expand(-1, channels, -1)).view_as(images)
