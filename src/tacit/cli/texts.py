"""Read what is typed: lists, paths, numbers; and keep what is said about it short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from tacit.errors import ConfigError

__all__ = ["at_most", "clipped", "path", "paths", "seconds", "seed", "split_algorithms", "whole"]

N = TypeVar("N", int, float)
_LINE = 600
"""Characters of a line that is said; the middle of a longer one is left out."""
_LONGEST = 10**9
"""Seconds, some thirty years."""
_MOST = 10**9
"""Of anything that is counted: epochs, images, restarts."""
_SEEDS = 2**63
"""How many there are: torch takes 63 bits."""


def clipped(text: str) -> str:
    """The text with the middle of each very long line left out: a name may be as long as it likes."""
    return "\n".join(_clipped(line) for line in text.split("\n"))


def _clipped(line: str) -> str:
    if len(line) <= _LINE:
        return line
    half = (_LINE - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"


def path(option: str, text: str | None) -> Path | None:
    """What was typed as a path; None where nothing was.

    Raises:
        ConfigError: It is an empty text, which would be the current folder.
    """
    if text is None:
        return None
    if not text:
        raise ConfigError(f"{option} is empty: give a name, or . for the current folder")
    return Path(text)


def paths(option: str, texts: Sequence[str]) -> list[Path]:
    """The same of several."""
    return [found for text in texts if (found := path(option, text)) is not None]


def seconds(option: str, value: float, example: float) -> float:
    """A time that can be waited.

    Raises:
        ConfigError: It is not above 0, or beyond what a clock counts to; infinity and NaN are.
    """
    if not 0 < value <= _LONGEST:
        raise ConfigError(
            f"{option} {value} must be more than 0, and at most {_LONGEST:,} s, e.g. {option} {example:g}"
        )
    return value


def whole(option: str, value: int, least: int = 1, most: int = _MOST) -> int:
    """A number of things.

    Raises:
        ConfigError: It is less than `least` or more than `most`.
    """
    if value < least:
        raise ConfigError(f"{option} {value} must be {'more than 0' if least == 1 else f'{least} or more'}")
    return at_most(option, value, most)


def at_most(option: str, value: int, most: int = _MOST) -> int:
    """A number of things whose least is known elsewhere.

    Raises:
        ConfigError: It is more than `most`.
    """
    if value > most:
        raise ConfigError(f"{option} {value} is too large: write {most:,} at most")
    return value


def seed(option: str, value: int) -> int:
    """What generators of random numbers take.

    Raises:
        ConfigError: It is negative, or has more than 63 bits.
    """
    if not 0 <= value < _SEEDS:
        raise ConfigError(f"{option} {value} must be 0 or more, and below 2^63, e.g. {option} 1")
    return value


def split_algorithms(text: str) -> list[str]:
    """Split a list at its commas, although commas also stand between an algorithm's parameters.

    A piece such as `momentum=0.9`, with "=" but without ":", goes on with the algorithm before it, so
    `topk:ratio=0.1,momentum=0.9,ddp` is a list of two.

    Raises:
        ConfigError: A name is missing.
    """
    texts: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if not piece:
            raise ConfigError(f"an algorithm is missing in {text!r}: write for example ddp,topk:ratio=0.01")
        if "=" not in piece or ":" in piece:
            texts.append(piece)
        elif texts and ":" in texts[-1]:
            texts[-1] += f",{piece}"
        else:
            raise ConfigError(
                f"the parameter {piece!r} belongs to no algorithm: write topk:{piece}, for example"
            )
    return texts
