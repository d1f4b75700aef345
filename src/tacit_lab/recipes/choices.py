"""The choices of a recipe, as options of the command and of its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The chosen values; None where the recipe decides.

    Attributes:
        model: The network's name.
        data: The path of the images.
        limit: How many of the training images are used, the first ones.
        precision: The type in which the network computes.
    """

    model: str | None = None
    data: Path | None = None
    limit: int | None = None
    precision: str | None = None

    def given(self) -> Mapping[str, Any]:
        """The chosen values, by name."""
        everything = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in everything.items() if value is not None}

    def words(self) -> list[str]:
        """The options that `add_to` reads back, in any folder."""
        given = {**self.given(), **({"data": self.data.absolute()} if self.data else {})}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each choice to a parser."""
        parser.add_argument("--model", help="the network")
        parser.add_argument("--data", type=Path, help="where the images are")
        parser.add_argument("--limit", type=int, help="train on so many images only")
        parser.add_argument("--precision", help="fp32 or bf16")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """The choices that a parser has read."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


NO_CHOICES = Choices()
