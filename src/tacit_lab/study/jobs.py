"""A training of a study, what came of it, and the file that keeps it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tacit.errors import ConfigError
from tacit.files import Log
from tacit_lab.records import EndRecord


@dataclass(frozen=True)
class StudyRun:
    """One training.

    Attributes:
        task: what is trained: a recipe's name, or a name of the caller's.
        arm: the algorithm; "{tenth}" and the like in it follow the length, see `written`.
        rate: what the learning rate is multiplied by.
    """

    task: str
    arm: str
    steps: int
    seed: int
    rate: float

    def differs_by_seed(self, other: StudyRun) -> bool:
        """Whether nothing but the seed differs, or nothing at all."""
        return (self.arm, self.rate, self.steps, self.task) == (
            other.arm, other.rate, other.steps, other.task
        )  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """What came of a training.

    Attributes:
        accuracy: on the test set, 0..1; minus its loss of a script that reports no accuracy (`by_loss`).
        validation: what rates are chosen by: the accuracy on a validation split, or minus a loss.
        loss: of training, over the last tenth of the steps; of a script what it reported last.
        share: of plain training's bytes; of a script, whose `megabytes` are counted, it is left at 1.
        seconds: of processor time; of a script on a cluster from attach to close.
    """

    job: StudyRun
    accuracy: float
    validation: float
    loss: float
    share: float
    seconds: float
    hardware: Mapping[str, object]
    megabytes: float | None = None
    by_loss: bool = False
    on_cluster: bool = False

    @classmethod
    def of(cls, job: StudyRun, end: EndRecord) -> Ended:
        """What came of a training that `tacit compare` would record so."""
        loss = end.loss if end.training_loss is None else end.training_loss
        loss = 0.0 if loss is None else loss
        validation = -math.inf if end.validation is None or math.isnan(end.validation) else end.validation
        return cls(
            job,
            accuracy=-loss if end.accuracy is None else end.accuracy,
            validation=validation,
            loss=loss,
            share=1.0,
            seconds=end.seconds or 0.0,
            hardware={},
            megabytes=end.mb_between_nodes,
            by_loss=end.accuracy is None,
            on_cluster=True,
        )

    @classmethod
    def from_json(cls, line: str) -> Ended:
        """Read a line back.

        Raises:
            ConfigError: it is no such line.
        """
        try:
            values = json.loads(line)
            return cls(**{**values, "job": StudyRun(**values["job"])})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(f"{line[:60]!r} is no record of a training: {error}") from error

    def to_json(self) -> str:
        """A line without its end."""
        return json.dumps(asdict(self))


def read(path: Path) -> dict[StudyRun, Ended]:
    """All that a file holds; a last line that a kill has cut short is passed over.

    Raises:
        ConfigError: it cannot be read, or another line is no record.
    """
    return {ended.job: ended for ended in _lines(path)}


def _lines(path: Path) -> Iterator[Ended]:
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    *lines, _ = text.split("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield Ended.from_json(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def append(path: Path, ended: Ended) -> None:
    """Write one line, behind whatever a killed writer left whole.

    Raises:
        ConfigError: the file cannot be opened.
        OSError: it cannot be written.
    """
    log = Log(path)
    try:
        log.write(ended.to_json())
    finally:
        log.close()


def written(arm: str, steps: int) -> str:
    """What is attached in a training of so many steps, some of whose arguments follow its length."""
    return arm.format(fifth=steps // 5, tenth=steps // 10, thirtieth=steps // 30)


def uncoded(arm: str) -> str:
    """The arm whose numbers are this one's bit for bit, as an entropy coder changes bytes alone."""
    return re.sub(r",?entropy=true(?=,|$)", "", arm).replace(":,", ":").rstrip(":")
