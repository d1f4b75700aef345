"""Checks of optimizers' parameters."""

from __future__ import annotations

import math

from tacit.errors import ConfigError


def checked_lr(lr: float) -> None:
    """Raise a `ConfigError` unless the learning rate is a number of 0 or more."""
    not_negative("lr", lr)


def fraction(name: str, value: float) -> None:
    """Raise a `ConfigError` unless the value is in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} is not in [0, 1): write such as 0.9")


def not_negative(name: str, value: float, zero: bool = True) -> None:
    """Raise a `ConfigError` if the value is negative or not finite, or 0 where `zero` is False."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(
            f"{name}={value} is not possible: write a number {'of 0 or more' if zero else 'above 0'}"
        )
