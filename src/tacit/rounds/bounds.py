"""Checks of the numbers of a schedule."""

from __future__ import annotations

from tacit.errors import ConfigError


def check(name: str, value: object, least: int) -> None:
    """Raise unless the value is a whole number of `least` or more.

    Raises:
        ConfigError: names the parameter and the given value.
    """
    if type(value) is not int or value < least:
        what = (
            "parts"
            if name == "fragments"
            else "epochs"
            if name == "patience" or name.endswith("epochs")
            else "steps"
        )
        what = "" if name.endswith("factor") else f" {what}"
        raise ConfigError(f"{name}={value!r} is not possible: write {least} or more{what}")


def check_share(name: str, value: object) -> None:
    """Raise unless the value is a number from 0 to below 1.

    Raises:
        ConfigError: names the parameter and the given value.
    """
    if type(value) not in (int, float) or not 0 <= value < 1:  # type: ignore[operator]
        raise ConfigError(f"{name}={value!r} is not possible: write a share from 0 to below 1")
