"""Parse and check the values of options: lists, numbers, paths, clusters. Shorten long messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tacit import files
from tacit.errors import AttachError, ConfigError
from tacit_lab.cluster import Cluster

if TYPE_CHECKING:
    from tacit.strategy import AnyStrategy

OUT = Path("tacit-out")
"""The folder for what commands record, where no --out is given."""
N = TypeVar("N", int, float)
_LONGEST_LINE = 600
"""Characters of a line of a message. The middle of a longer line is left out, of its long words first."""
_LONGEST_WORD = 120
"""Parts of a longer error line: a word from the command line, and the text around it."""
_LONGEST = 10**9
"""About thirty years."""
_MOST = 10**9
"""The largest number of epochs, images, restarts and so on."""
_MOST_SEEDS = 1000
_SEEDS = 2**63
"""torch takes seeds of 63 bits."""


def shortened(text: str) -> str:
    """The text, with the middle of every very long line left out; of its long words, if that will do."""
    return "\n".join(_shortened(line) for line in text.split("\n"))


def _shortened(line: str) -> str:
    if len(line) > _LONGEST_LINE:
        line = " ".join(_cut(word, _LONGEST_WORD) for word in line.split(" "))
    return _cut(line, _LONGEST_LINE)


def _cut(text: str, longest: int) -> str:
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def cluster(text: str, servers: int, *, planned: bool = False) -> Cluster:
    """The cluster of --cluster, with as many parameter servers as --servers says, or the text itself if 0.

    `planned`: whether it is not to be emulated.

    Raises:
        ConfigError: The text is no cluster, or the number of servers is negative or given twice.
    """
    parsed = Cluster.parse(text)
    if servers < 0:
        raise ConfigError(f"--servers {servers} is not possible: write for example --servers 1")
    if servers and parsed.servers:
        raise ConfigError(
            f"--servers {servers} and --cluster {parsed} both have the number of servers: leave one out"
        )
    found = replace(parsed, servers=servers) if servers else parsed
    if not planned:
        found.check_emulated()
    return found


def path(option: str, text: str | None) -> Path | None:
    """The path of an option; None if the option is absent.

    Raises:
        ConfigError: The text is empty. As a path it would mean the current folder.
    """
    if text is None:
        return None
    if not text:
        raise ConfigError(f"{option} is empty: give a name, or . for the current folder")
    return Path(text)


def paths(option: str, texts: Sequence[str]) -> list[Path]:
    """The paths of an option that takes several."""
    return [found for text in texts if (found := path(option, text)) is not None]


def out(given: Path | None, name: str) -> Path:
    """The folder of --out; without it one in OUT that is named by the time and `name`. It is not made."""
    return (given or OUT / f"{datetime.now():%Y%m%d-%H%M%S}-{name}").absolute()


def made(option: str, folder: Path) -> Path:
    """The folder of an option, made if it is not there.

    Raises:
        ConfigError: It cannot be written to.
    """
    files.folder(folder, option)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {option} {folder}: {error.strerror}") from error
    return folder


def seconds(option: str, value: float, example: float) -> float:
    """A time limit or an interval, in seconds.

    Raises:
        ConfigError: It is not above 0, or larger than 10^9, or NaN.
    """
    if not 0 < value <= _LONGEST:
        raise ConfigError(
            f"{option} {value} must be more than 0, and at most {_LONGEST:,} s, e.g. {option} {example:g}"
        )
    return value


_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)", re.ASCII)


def duration(option: str, text: str, example: str) -> float:
    """A time with its unit, such as 20s, in seconds.

    Raises:
        ConfigError: It is no such text, or not above 0.
    """
    found = _DURATION.fullmatch(text.strip())
    value = float(found[1]) * _UNITS.get(found[2], 0.0) if found else 0.0
    if not 0 < value <= _LONGEST:
        raise ConfigError(
            f"{option} {text!r} must be a time above 0 with its unit ({', '.join(_UNITS)}), e.g. {option} "
            f"{example}"
        )
    return value


def churn(text: str, cluster: Cluster, strategies: Iterable[AnyStrategy]) -> float:
    """The seconds of --churn, where the replicas of this cluster can come and go with these strategies.

    Raises:
        ConfigError: They cannot, or it is no time.
    """
    from tacit.attaching.member_requirements import check_strategy
    from tacit_lab.testbed.testbed import check_churn

    every = duration("--churn", text, "20s")
    check_churn(cluster)
    for strategy in strategies:
        try:
            check_strategy(strategy)
        except AttachError as error:
            raise ConfigError(f"--churn {text}: {error}") from error
    return every


def whole(option: str, value: int, least: int = 1, most: int = _MOST) -> int:
    """A whole number between `least` and `most`.

    Raises:
        ConfigError: It is less than `least` or more than `most`.
    """
    if value < least:
        raise ConfigError(f"{option} {value} must be {'more than 0' if least == 1 else f'{least} or more'}")
    return at_most(option, value, most)


def at_most(option: str, value: int, most: int = _MOST) -> int:
    """A whole number of at most `most`; its lower bound is checked elsewhere.

    Raises:
        ConfigError: It is more than `most`.
    """
    if value > most:
        raise ConfigError(f"{option} {value} is too large: write {most:,} at most")
    return value


def seed(option: str, value: int) -> int:
    """A seed of a random number generator.

    Raises:
        ConfigError: It is negative, or has more than 63 bits.
    """
    if not 0 <= value < _SEEDS:
        raise ConfigError(f"{option} {value} must be 0 or more, and below 2^63, e.g. {option} 1")
    return value


def seeds(option: str, text: str) -> tuple[int, ...]:
    """A list of seeds, in order: numbers with commas, or the first and the last with two dots between.

    Raises:
        ConfigError: It is no such list, a seed is not possible, or there are more than a thousand.
    """
    first, dots, last = text.partition("..")
    try:
        numbers_ = [int(each) for each in ([first, last] if dots else split(text))]
    except ValueError:
        numbers_ = []
    for each in numbers_:
        seed(option, each)
    found: Sequence[int] = range(numbers_[0], numbers_[1] + 1) if dots and numbers_ else numbers_
    if not 0 < len(found) <= _MOST_SEEDS or len({*found}) < len(found):
        raise ConfigError(f"{option} {text!r} is no list of seeds: write for example {option} 0..2, or 0,3")
    return tuple(sorted(found))


def split(text: str) -> list[str]:
    """The parts of a list with commas, without empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(option: str, text: str, kind: type[N]) -> list[N]:
    """A list of numbers with commas, each of them 0 or more.

    Raises:
        ConfigError: The list is empty, or a part of it is no number, is negative, infinite or NaN.
    """
    try:
        found = [kind(part) for part in split(text)]
    except ValueError:
        found = []
    if not found or not all(0 <= each < float("inf") for each in found):
        raise ConfigError(
            f"{option} {text!r} is no list of numbers, 0 or more: write for example {option} 1,2"
        )
    return found


def split_algorithms(text: str) -> list[str]:
    """The texts of a list of algorithms, in which commas also separate an algorithm's parameters.

    A part with "=" but without ":", such as `momentum=0.9`, is a parameter of the algorithm before it. So
    `topk:ratio=0.1,momentum=0.9,ddp` is a list of two algorithms.

    Raises:
        ConfigError: A name is missing.
    """
    from tacit.algorithms.registry import canonical

    texts: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if not part:
            raise ConfigError(f"an algorithm is missing in {text!r}: write for example ddp,topk:ratio=0.01")
        spaced = " " in part.partition("=")[0].strip()  # a space for the colon: `parse` says what to write
        if "=" not in part or ":" in part or spaced:
            texts.append(canonical(part))
        elif texts and ":" in texts[-1]:
            texts[-1] += f",{part}"
        else:
            raise ConfigError(
                f"the parameter {part!r} belongs to no algorithm: write topk:{part}, for example"
            )
    return texts
