"""What optimizers refuse."""

from __future__ import annotations

import math

from tacit.errors import ConfigError


def checked_lr(lr: float) -> None:
    """Refuse a learning rate that is no number of 0 or more."""
    not_negative("lr", lr)


def fraction(name: str, value: float) -> None:
    """Refuse what is not in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name}={value} is not in [0, 1): write such as 0.9")


def not_negative(name: str, value: float, zero: bool = True) -> None:
    """Refuse what is negative or not finite, and 0 too where it is not allowed."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise ConfigError(
            f"{name}={value} is not possible: write a number {'of 0 or more' if zero else 'above 0'}"
        )
