"""What is registered on a user's model acts there; a copy or a pickle of the model has nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, update_wrapper
from typing import Any

__all__ = ["ForwardSync", "NotCopied", "OnlyHere"]

_NOTHING = nullcontext().__exit__
"""Takes whatever it is called with, and returns None."""


class OnlyHere(partial[Any]):
    """A hook that a copy of the model has another function for: one that does nothing, if none is given.

    A pickle names nothing of tacit, and so can be read where that is not installed.

    Args:
        call: the hook.
        in_copies: what a copy has; taken by pickle by its name.
    """

    def __new__(cls, call: Callable[..., Any], in_copies: Callable[..., Any] = _NOTHING) -> OnlyHere:
        """A partial function without arguments of its own: calling it adds no frame to a step."""
        made = super().__new__(cls, call)
        made._in_copies = in_copies
        update_wrapper(made, call)
        return made

    _in_copies: Callable[..., Any]

    def __deepcopy__(self, memo: object) -> Callable[..., Any]:
        """What a copy has."""
        return self._in_copies

    def __reduce__(self) -> tuple[Any, ...]:
        """The same, for pickle."""
        return partial, (self._in_copies,)


class NotCopied:
    """None in a copy or a pickle of what holds it."""

    def __deepcopy__(self, memo: object) -> None:
        """None."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The same, for pickle."""
        return type(None), ()


class ForwardSync(int):
    """False, in place of another value, which a copy has again."""

    before: bool

    @staticmethod
    def off(before: bool) -> Any:
        """In place of `before`."""
        made = ForwardSync(0)
        made.before = bool(before)
        return made

    def __deepcopy__(self, memo: object) -> bool:
        """What it was before."""
        return self.before

    def __reduce__(self) -> tuple[Any, ...]:
        """The same, for pickle."""
        return bool, (self.before,)
