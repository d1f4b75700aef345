"""Models and data that `tacit compare` and the benchmarks train."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tacit.errors import unknown

if TYPE_CHECKING:
    from tacit.recipes.recipe import Recipe

__all__ = ["get", "known"]

# Where each recipe lives; it is imported when asked for, since torch takes a second.
_RECIPES = {"bytes": ("tacit.recipes.bytes", "Bytes"), "digits": ("tacit.recipes.digits", "Digits")}


def known() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(_RECIPES)


def get(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ConfigError: There is none; the message names the nearest.
    """
    if name not in _RECIPES:
        raise unknown("recipe", name, _RECIPES)
    module, cls = _RECIPES[name]
    recipe: Recipe = getattr(import_module(module), cls)()
    return recipe
