"""A training run, what came of it, and the file of JSON lines that keeps it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tacit.files import output

COMPUTE_ONLY = "compute-only"
FOREVER = 1_000_000
"""Steps or epochs that nothing here reaches the end of."""
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        recipe: its name and its choices, as `tacit compare` takes them, such as ("cifar10", "--data", PATH).
        cluster: without servers; `servers`: how many stand beside it.
        epochs: None: as many as the recipe has.
    """

    recipe: tuple[str, ...]
    algorithm: str
    cluster: str
    servers: int = 0
    seed: int = 0
    epochs: int | None = None

    @property
    def key(self) -> Run:
        """What is equal of equal runs: it does not matter in which folder the data lies."""
        words = list(self.recipe)
        for i, word in enumerate(words[:-1]):
            if word == "--data":
                words[i + 1] = Path(words[i + 1]).name
        return replace(self, recipe=tuple(words))

    @property
    def setting(self) -> Run:
        """The same without what paired runs differ in: the algorithm and the seed."""
        return replace(self.key, algorithm="", seed=0)


@dataclass(frozen=True)
class Done:
    """What came of a run; what was not measured is None.

    Attributes:
        accuracy: held out, after the last epoch, 0..1.
        seconds: of training, without launch and evaluation; `steps`: how many.
        megabytes: 10^6 bytes that all nodes' interfaces transmitted.
        curve: after each epoch the step, the seconds, the loss (None where not finite) and the accuracy.
        parameters: of the model; `strategy`: the canonical text of what was attached.
        hardware: as of `paired.hardware`, with the commit.
        error: why it failed.
    """

    run: Run
    status: Literal["ok", "failed", "interrupted"]
    accuracy: float | None = None
    loss: float | None = None
    seconds: float | None = None
    seconds_to_target: float | None = None
    steps: int | None = None
    megabytes: float | None = None
    parameters: int | None = None
    strategy: str = ""
    curve: list[list[Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    hardware: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> str:
        """A line without its end."""
        return json.dumps(asdict(replace(self, run=self.run.key)))

    @classmethod
    def from_json(cls, line: str) -> Done:
        """Read a line back; what it has and this class has not is left out."""
        values = json.loads(line)
        run = values.pop("run")
        known = {each.name for each in fields(cls)}
        return cls(
            run=Run(**{**run, "recipe": tuple(run["recipe"])}),
            **{name: value for name, value in values.items() if name in known},
        )


def lines(path: Path, parse: Callable[[str], T]) -> Iterator[T]:
    """What a file's lines say; one that was cut short by a kill is passed over."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield parse(line)
        except (json.JSONDecodeError, KeyError, TypeError):
            print(f"{path}: passed over {line[:60]!r}, which is not whole", file=sys.stderr)


def read(path: Path) -> list[Done]:
    """The runs that a file holds, as they were made last; no failure takes the place of a success."""
    found: dict[Run, Done] = {}
    for done in lines(path, Done.from_json):
        kept = found.get(done.run)
        if kept is None or kept.status != "ok" or done.status == "ok":
            found[done.run] = done
    return list(found.values())


def held(path: Path) -> dict[Run, Done]:
    """The runs that a file holds and that ended well."""
    return {done.run: done for done in read(path) if done.status == "ok"}


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
