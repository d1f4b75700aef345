"""Checks of parameters: a wrong type or value raises a `ConfigError` that says what to write."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tacit.contracts import Compressor, Matrix
from tacit.errors import ConfigError, unknown


def whole(name: str, given: object, least: int, most: int | None, write: str) -> None:
    """Check that `given` is a whole number from `least` to `most` (None: no limit). `write`: the hint.

    Raises:
        ConfigError: names the parameter, the given value, and the range.
    """
    fits = type(given) is int and least <= given and (most is None or given <= most)
    if not fits:
        range_ = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name}={given!r} is not a whole number, {range_}: {write}")


def real(
    name: str,
    given: object,
    write: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Check that `given` is a finite number within the bounds, and not a bool. `write`: the hint.

    Raises:
        ConfigError: names the parameter, the given value, and the range.
    """
    if not (is_real(given) and above < given < below and least <= given <= most):  # type: ignore[operator]
        range_ = _range(above, least, below, most)
        raise ConfigError(f"{name}={given!r} is not {range_}: {write}")


def is_real(given: object) -> bool:
    """Whether it is a finite int or float."""
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


def _range(above: float, least: float, below: float, most: float) -> str:
    if max(above, least) > -math.inf and min(below, most) < math.inf:
        left, low = ("(", above) if above > -math.inf else ("[", least)
        right, high = (")", below) if below < math.inf else ("]", most)
        return f"in {left}{low:g}, {high:g}{right}"
    if above > -math.inf:
        return f"a finite number above {above:g}"
    return f"a finite number, {least:g} or more"


def flag(name: str, given: object) -> None:
    """Check that `given` is True or False.

    Raises:
        ConfigError: names the parameter and the given value.
    """
    if not isinstance(given, bool):
        raise ConfigError(f"{name}={given!r} is neither True nor False: write one of them")


def one_of(name: str, given: object, known: Sequence[str]) -> None:
    """Check that `given` is one of the `known` strings.

    Raises:
        ConfigError: names the parameter, the given value, and the known strings.
    """
    if not isinstance(given, str):
        raise ConfigError(f"{name}={given!r} is not known: write one of {', '.join(map(repr, known))}")
    if given not in known:
        raise unknown(name, given, known)


def compressor(name: str, given: object) -> None:
    """Check that `given` is a compressor, and not its class or name, and can be a key.

    Raises:
        ConfigError: names the parameter and the given value.
    """
    if not isinstance(given, Compressor):
        shown = given.__name__ if isinstance(given, type) else repr(given)
        raise ConfigError(
            f"{name}={shown} is no compressor: write a value such as TopK(ratio=0.01), with its brackets"
        )
    try:
        hash(given)
    except TypeError as error:
        raise ConfigError(
            f"{name}={given} has a field that can change ({error}): write a frozen dataclass, with a tuple "
            "in place of a list"
        ) from error


def matrices(given: object) -> None:
    """Check that `given` is a tuple of `Matrix`.

    Raises:
        ConfigError: names the given value.
    """
    if not isinstance(given, tuple) or not all(isinstance(m, Matrix) for m in given):
        raise ConfigError(f"matrices={given!r} is no tuple of Matrix: leave it out, attaching fills it in")
