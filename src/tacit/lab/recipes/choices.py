"""What can be chosen of a recipe: the same words for the command and for its ranks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

__all__ = ["NO_CHOICES", "Choices"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What was chosen; None where the recipe decides.

    Attributes:
        model: The network's name.
        data: Where the images are.
        limit: How many of the training images are used, the first ones.
        precision: What the network computes in.
    """

    model: str | None = None
    data: Path | None = None
    limit: int | None = None
    precision: str | None = None

    def given(self) -> Mapping[str, Any]:
        """What was chosen, by name."""
        everything = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in everything.items() if value is not None}

    def words(self) -> list[str]:
        """The options that `add_to` reads back, in whatever folder they are read."""
        given = {**self.given(), **({"data": self.data.absolute()} if self.data else {})}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    @classmethod
    def add_to(cls, parser: argparse.ArgumentParser) -> None:
        """Give a parser an option for each."""
        parser.add_argument("--model", help="the network")
        parser.add_argument("--data", type=Path, help="where the images are")
        parser.add_argument("--limit", type=int, help="train on so many images only")
        parser.add_argument("--precision", help="fp32 or bf16")

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """What a parser has read."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})


NO_CHOICES = Choices()
