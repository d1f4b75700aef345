"""The networks that recipes train, in the size of 32x32 images; a file for each family."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from tacit.errors import unknown

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "known"]

# Where each network for images lives; it is imported when asked for, since torch takes a second.
_MODELS = {
    "alexnet": ("alexnet", "alexnet"),
    "lenet": ("lenet", "lenet5"),
    "resnet8": ("resnet", "resnet8"),
    "resnet20": ("resnet", "resnet20"),
    "vgg11": ("vgg", "vgg11"),
    "vgg11-narrow": ("vgg", "vgg11_narrow"),
    "vit": ("vit", "vit"),
}


def known() -> list[str]:
    """The names of all networks for images, sorted."""
    return sorted(_MODELS)


def build(name: str, *, channels: int, classes: int) -> nn.Module:
    """A fresh network, from images of shape (batch, channels, 32, 32) to scores of shape (batch, classes).

    Raises:
        ConfigError: There is none of this name; the message names the nearest, and all there are.
    """
    if name not in _MODELS:
        raise unknown("model", name, _MODELS)
    module, function = _MODELS[name]
    make: Callable[..., nn.Module] = getattr(import_module(f"{__name__}.{module}"), function)
    return make(channels=channels, classes=classes)
