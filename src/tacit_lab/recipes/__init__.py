"""Models and data that `tacit compare` and the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tacit.errors import ConfigError, unknown
from tacit_lab.recipes.choices import NO_CHOICES, Choices

if TYPE_CHECKING:
    from tacit_lab.recipes.recipe import Recipe

__all__ = ["NO_CHOICES", "Choices", "check", "fetch", "get", "known"]


class _Home(NamedTuple):
    """The module of a recipe; it is imported when needed, since torch takes a second."""

    module: str
    name: str
    takes: tuple[str, ...] = ()
    """The choices that the recipe takes."""


_OF_IMAGES = ("model", "data", "limit", "precision")
_RECIPES = {
    "bytes": _Home("bytes", "Bytes"),
    "cifar10": _Home("images", "cifar10", _OF_IMAGES),
    "digits": _Home("images", "digits", ("model",)),
    "gpt": _Home("bytes", "Gpt"),
    "lora": _Home("lora", "Lora"),
    "mnist": _Home("images", "mnist", _OF_IMAGES),
    "recommender": _Home("recommender", "Recommender"),
}


def known() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(_RECIPES)


def check(name: str) -> None:
    """Raise a `ConfigError`, which names the nearest, if there is no such recipe. Imports nothing."""
    _home(name)


def get(name: str, choices: Choices = NO_CHOICES) -> Recipe:
    """The recipe of this name with these choices; its data is read when first needed.

    Raises:
        ConfigError: There is no such recipe, and the message names the nearest; it has no such choice; or a
            chosen value is not possible.
    """
    home = _home(name)
    given = choices.given()
    for choice in given:
        if choice not in home.takes:
            raise _without_effect(choice, name, choice)
    make = getattr(import_module(f"{__name__}.{home.module}"), home.name)
    recipe: Recipe = make(**given)
    return recipe


def fetch(name: str, tell: Callable[[str], None]) -> Path:
    """Download what a recipe trains on, from its authors' address, unless that was done before.

    Args:
        name: The recipe's.
        tell: Called with a line about each file before it is fetched.

    Returns:
        The path to choose as `data`.

    Raises:
        ConfigError: It needs no data, no server answers, or the data has another checksum.
    """
    if "data" not in _home(name).takes:
        raise _without_effect("download", name, "data")
    from tacit_lab.recipes.data import download

    return download.fetch(name, tell)


def _home(name: str) -> _Home:
    if name not in _RECIPES:
        raise unknown("recipe", name, _RECIPES)
    return _RECIPES[name]


def _without_effect(option: str, name: str, choice: str) -> ConfigError:
    others = " and ".join(each for each in known() if choice in _RECIPES[each].takes)
    return ConfigError(f"--{option} would do nothing for {name}: leave it out, or train {others}")
