"""The loss of compressing a mean again, measured on normally distributed entries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tacit.contracts import Context, OneShot, OneShotUse, formed
from tacit.kernels.dispatch import plain_torch

ENTRIES = 1 << 15


class _Room:
    """Buffers for one encoding."""

    def spare(self, field: str, like: Tensor) -> Tensor:
        """Not called, as a one-shot codec has no state."""
        raise AssertionError("a one-shot codec has no state")

    def scratch(self, key: str, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new, uninitialised tensor."""
        return torch.empty(tuple(shape), dtype=dtype)


def loss(codec: OneShot) -> float:
    """The squared error of one encoding, as a share of its input."""
    x = torch.randn(ENTRIES, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    ctx = Context(out=torch.empty_like(x), work=_Room(), peers=2, name="price")
    decoded = torch.empty_like(x)
    codec.decode_(formed(codec, codec.encode(x.clone(), ctx), x), decoded)
    return float((decoded - x).square().sum() / x.square().sum())


@cache
def price(side: OneShotUse) -> float:
    """The weight of a byte if the mean is compressed again by this codec; 1 if that loses nothing.

    With E the squared error of one encoding, as a share of its input: under error feedback a share 1 - E of
    the residual is sent in a round, so that an entry of the mean waits for 1 / (1 - E) rounds. An unbiased
    codec adds noise of E times the mean's square, and training takes 1 + E times as long where noise
    decides. Under feedback of means alone a byte counts as one: what waits is at work in the replicas, which
    keep what they have not sent.

    Raises:
        ConfigError: the codec's payload is no tuple of tensors.
        PayloadError: its shapes are others than on a meta tensor.
    """
    if side.has_mean_feedback:
        return 1.0
    with plain_torch():
        error = loss(side.codec)
    if side.codec.unbiased and not side.has_feedback:
        return 1 + error
    return 1 / (1 - error) if error < 1 else float("inf")
