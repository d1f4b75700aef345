"""Hooks on a user's model that its copies and pickles do not have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any

_NOTHING = nullcontext().__exit__
"""A function that takes any arguments and returns None."""


class OnlyHere(partial[Any]):
    """A hook that is another function in a copy of the model; by default one that does nothing.

    A pickle names nothing of tacit, so it can be read where tacit is not installed.

    Args:
        call: the hook.
        in_copies: the function in copies; pickle refers to it by name.
    """

    def __new__(cls, call: Callable[..., Any], in_copies: Callable[..., Any] = _NOTHING) -> OnlyHere:
        """A partial function without arguments of its own: calling it adds no frame to a step."""
        made = super().__new__(cls, call)
        made._in_copies = in_copies
        update_wrapper(made, call)
        return made

    _in_copies: Callable[..., Any]

    def __deepcopy__(self, memo: object) -> Callable[..., Any]:
        """The function for a copy."""
        return self._in_copies

    def __reduce__(self) -> tuple[Any, ...]:
        """As `__deepcopy__`, for pickle."""
        return partial, (self._in_copies,)


class NotCopied:
    """An object that is None in a copy or a pickle of its holder."""

    def __deepcopy__(self, memo: object) -> None:
        """None."""

    def __reduce__(self) -> tuple[Any, ...]:
        """As `__deepcopy__`, for pickle."""
        return type(None), ()


class ForwardSync(int):
    """False in place of another value, which a copy has again."""

    before: bool

    @staticmethod
    def off(before: bool) -> Any:
        """A False that takes the place of `before`."""
        made = ForwardSync(0)
        made.before = bool(before)
        return made

    def __deepcopy__(self, memo: object) -> bool:
        """The value before."""
        return self.before

    def __reduce__(self) -> tuple[Any, ...]:
        """As `__deepcopy__`, for pickle."""
        return bool, (self.before,)
