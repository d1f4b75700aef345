"""The return types of all readers of images."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Split(NamedTuple):
    """Images and their classes.

    Attributes:
        images: uint8 of shape (n, channels, height, width).
        targets: uint8 of shape (n,); int64 where they come out of the cache.
    """

    images: Tensor
    targets: Tensor


class Images(NamedTuple):
    """Training images and held-out images."""

    train: Split
    test: Split
