"""A training whose steps are timed, and files of JSON lines that keep what was found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tacit.files import output

COMPUTE_ONLY = "compute-only"
FOREVER = 1_000_000
"""Steps or epochs that nothing here reaches the end of."""
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A training whose steps are timed.

    Attributes:
        recipe: its name and its choices, as `tacit compare` takes them, such as ("cifar10", "--data", PATH).
        cluster: with its parameter servers, if it has any.
        epochs: None: as many as the recipe has.
    """

    recipe: tuple[str, ...]
    cluster: str
    epochs: int | None = None

    @property
    def key(self) -> Run:
        """What is equal of equal runs: it does not matter in which folder the data lies."""
        words = list(self.recipe)
        for i, word in enumerate(words[:-1]):
            if word == "--data":
                words[i + 1] = Path(words[i + 1]).name
        return replace(self, recipe=tuple(words))


def lines(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """What a file's lines say; one that was cut short by a kill is passed over."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield parse(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            print(f"{path}: passed over {line[:60]!r}, which is not whole", file=sys.stderr)


def append(path: Path, line: str) -> None:
    """Write one line, behind whatever a killed writer left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with output(path, "the record").open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
